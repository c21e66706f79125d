// The analyzer's list of frames with the detail of the chosen one, for captures and live
// connections alike. What is chosen is in the URL.

import { el, put } from "../dom.js";
import { count, protocolName, timeText, visible } from "../format.js";
import { noDetail, showDetail } from "./frame_detail.js";
import { virtualList } from "./virtual_list.js";

const NARROW = matchMedia("(max-width: 40rem)");
const ROW = 30;
const NARROW_ROW = 56;

/**
 * `rows` is the source's own list of frames, in order; `more()` asks for those after the last one;
 * `detail(row)` gives a frame with fields and bytes; `follow(frame)` shows its conversation.
 */
export function framesView(screen, { rows, more, detail, follow, withConnection, describeConnection }) {
  const shown = el("section", { class: "frame-detail panel", "aria-label": "The chosen frame" }, noDetail());
  const status = el("p", { class: "table-status", role: "status" });
  const note = el("div", {});
  let leaveDetail = () => {};
  let wanted = 0;

  const list = virtualList({
    label: "Frames",
    rowHeight: () => (NARROW.matches ? NARROW_ROW : ROW),
    fill: (option, index) => fill(option, rows[index]),
    choose: (index) => choose(index),
    nearEnd: more,
    open: () => shown.querySelector("h2")?.focus(),
  });
  screen.signal.addEventListener("abort", () => { list.leave(); leaveDetail(); });

  function fill(option, row) {
    option.classList.toggle("violation", Boolean(row.violation));
    const isForward = row.direction === "forward";
    option.append(
      el("span", { class: "f-number" }, count(row.number)),
      el("span", { class: "f-time" }, row.time ? timeText(row.time, { millis: true }).split(" ").at(-1) : "–"),
      withConnection ? el("span", { class: "f-connection", title: describeConnection?.(row.connection) }, visible(row.connection)) : "",
      el("span", { class: `f-direction ${row.direction}`, title: `from the ${row.sender}` },
        el("span", { "aria-hidden": "true" }, isForward ? "→" : "←"),
        el("span", { class: "unseen" }, `from the ${visible(row.sender)}`)),
      el("span", { class: "f-frame" }, el("span", { class: `protocol ${row.protocol}` }, protocolName(row.protocol)), " ",
        row.violation ? el("b", {}, `✗ ${visible(row.violation.error)}`) : visible(row.frame)),
      el("span", { class: "f-destination" }, el("bdi", {}, visible(row.destination))),
      el("span", { class: "f-length" }, `${count(row.length)} B`),
      el("span", { class: "f-summary" }, el("bdi", {}, visible(row.violation ? `${row.violation.reason} – ${row.violation.clause}` : row.summary))));
  }

  async function choose(index, { key = "", isFirst = false } = {}) {
    const row = rows[index];
    wanted = row.number;
    list.mark(index);
    screen.setQuery({ n: row.number, field: key }, { replace: true });
    try {
      const frame = await detail(row);
      if (wanted === row.number && !screen.signal.aborted) display(frame, key, isFirst);
    } catch (error) {
      screen.fail(error, shown);
    }
  }

  function display(frame, key, isFirst) {
    leaveDetail();
    // Who uses the keyboard stays in the detail, on the same button if there is one.
    const focused = shown.contains(document.activeElement) ? document.activeElement.textContent : null;
    const canFollow = Boolean(frame.conversation) && follow;
    leaveDetail = showDetail(shown, frame, {
      key,
      chosen: (field) => screen.setQuery({ field }, { replace: true }),
      actions: [
        canFollow ? el("button", { type: "button", onclick: () => follow(frame) }, "Follow conversation") : null,
        el("button", { type: "button", class: "quiet", onclick: () => step(-1) }, "Previous"),
        el("button", { type: "button", class: "quiet", onclick: () => step(1) }, "Next"),
      ],
    });
    if (focused !== null) {
      const button = [...shown.querySelectorAll("button")].find((each) => each.textContent === focused);
      (button ?? shown.querySelector("h2"))?.focus({ preventScroll: true });
    }
    // On a small screen the detail is below the list.
    if (NARROW.matches && !isFirst) shown.scrollIntoView({ block: "start" });
  }

  function step(by) {
    const index = list.chosen + by;
    if (index >= 0 && index < rows.length) choose(index);
  }

  const columns = el("div", { class: `frame-columns ${withConnection ? "with-connection" : ""}`, "aria-hidden": "true" },
    ["No.", "Time", withConnection ? "Conn." : null, "", "Frame", "Destination", "Length", "Fields"]
      .filter((each) => each !== null).map((each) => el("span", {}, each)));
  list.root.classList.toggle("with-connection", Boolean(withConnection));

  return {
    root: el("div", { class: "frames" }, note, el("div", { class: "frame-list" }, columns, list.root), status, shown),
    list,
    status,
    note,
    choose,
    /** Shows the rows anew, with none chosen. */
    restart() {
      wanted = 0;
      list.mark(-1);
      list.root.scrollTop = 0;
      list.setSize(rows.length);
      leaveDetail();
      leaveDetail = () => {};
      put(shown, noDetail());
    },
    showDetail: display,
  };
}

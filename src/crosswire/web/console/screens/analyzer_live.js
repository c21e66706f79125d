// The frames of a live connection, from the moment on at which it is watched.

import * as api from "../api.js";
import { conversationChip, filterForm } from "../analyzer/filters.js";
import { framesView } from "../analyzer/frames_view.js";
import { el, notice, put } from "../dom.js";
import { count, name, plural, protocolName, visible } from "../format.js";
import { connectionLink } from "../links.js";

const MOST = 10_000;
const DROPPED = 500; // at once, when there are too many

export async function show(screen) {
  const { id } = screen.params;
  const connection = await api.get(api.apiPath("/v1/connections", id), {}, screen.signal);
  const state = el("span", { class: "tag" }, "connecting");
  const pause = el("button", { type: "button", "aria-pressed": "false", onclick: toggle }, "Pause");
  const follow = el("input", { type: "checkbox", id: "follow-frames", checked: true });
  screen.heading(el("span", {}, "Frames of ", name(id)), {
    back: [["Protocol analyzer", "#/analyzer"]],
    actions: [el("label", { class: "check", for: "follow-frames" }, follow, " Scroll to new frames"), pause,
      el("button", { type: "button", class: "quiet", onclick: clear }, "Clear")],
    subtitle: el("span", {}, state, " ", protocolName(connection.protocol), " from ", name(connection.address),
      connection.principal ? [" as ", name(connection.principal)] : "", " · ", connectionLink(id)),
  });

  const all = [];
  const rows = [];
  let dropped = 0;
  let lost = 0;
  let isPaused = false;
  let missed = 0;
  const chip = el("div", {});
  const end = el("div", { "aria-live": "assertive" });

  const filters = filterForm(screen, [
    { name: "frame", label: "Frame is" },
    { name: "destination", label: "Destination contains" },
    { name: "text", label: "Text in fields or bytes", wide: true },
    { name: "violations", label: "Violations only", check: true },
  ], choose);
  const view = framesView(screen, {
    rows,
    more: () => {},
    withConnection: false,
    detail: async (row) => row,
    follow: (frame) => { screen.setQuery({ conversation: frame.conversation }); choose(); },
  });
  screen.root.append(end, filters, chip, view.root);
  choose();

  function toggle() {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", String(isPaused));
    put(pause, isPaused ? "Continue" : "Pause");
    if (!isPaused) missed = 0;
    showStatus();
  }

  function clear() {
    all.length = 0;
    dropped = 0;
    choose();
  }

  function choose() {
    put(chip, conversationChip(screen, () => { screen.setQuery({ conversation: "" }); choose(); }));
    rows.length = 0;
    rows.push(...all.filter(isChosen));
    view.restart();
    if (follow.checked) view.list.toEnd();
    showStatus();
  }

  function isChosen(row) {
    const { frame, destination, text, violations, conversation } = screen.query;
    return (!frame || row.frame === frame) && (!destination || row.destination.includes(destination))
      && (!conversation || row.conversation === conversation) && (!violations || row.violation !== null)
      && (!text || row.search.includes(text.toLowerCase()));
  }

  // Frames come one by one, and are shown together: once for each picture of the screen.
  let arrived = [];

  function add(row) {
    if (isPaused) {
      missed += 1;
      if (missed === 1 || missed % 100 === 0) showStatus();
      return;
    }
    if (arrived.length === 0) requestAnimationFrame(take);
    arrived.push(row);
  }

  function take() {
    const fresh = arrived;
    arrived = [];
    for (const row of fresh) {
      row.search = `${row.frame} ${row.summary} ${row.violation?.reason ?? ""} ${ascii(row.hex)}`.toLowerCase();
      all.push(row);
      if (isChosen(row)) rows.push(row);
    }
    let removed = 0;
    if (all.length > MOST) {
      const gone = all.splice(0, all.length - MOST + DROPPED);
      dropped += gone.length;
      const first = all[0].number;
      while (rows.length > removed && rows[removed].number < first) removed += 1;
      rows.splice(0, removed);
    }
    view.list.grow(rows.length, removed);
    if (follow.checked) view.list.toEnd();
    showStatus();
  }

  function showStatus() {
    const parts = [rows.length === all.length ? plural(all.length, "frame") : `${count(rows.length)} of ${plural(all.length, "frame")}`];
    if (all.length === 0 && !isPaused) parts[0] = "No frame has passed since you began to watch. It begins at the first that can be recognized.";
    if (isPaused) parts.push(`paused: ${plural(missed, "frame")} passed meanwhile and ${missed === 1 ? "is" : "are"} not shown`);
    if (dropped) parts.push(`the first ${count(dropped)} are no longer kept`);
    if (lost) parts.push(`${count(lost)} were left out because there were too many`);
    put(view.status, parts.join(" · "));
  }

  // Not waited for: it lasts as long as the screen.
  api.stream(api.apiPath("/v1/connections", id, "frames"), {}, {
    event(kind, data) {
      if (kind === "frame") add(data);
      else if (kind === "lost") { lost += data.events; showStatus(); }
      else if (kind === "end") {
        put(end, notice(data.clause ? "bad" : "info", el("p", {}, name(data.reason)),
          data.clause ? el("p", { class: "clause" }, "Breaks ", el("strong", {}, visible(data.clause)),
            data.page ? el("span", { class: "muted" }, ` (documentation: ${visible(data.page)})`) : null) : null));
      }
    },
    state(text, isLive) {
      put(state, isLive ? "live" : visible(text).slice(0, 60));
      state.className = `tag ${isLive ? "good" : "warn"}`;
    },
  }, screen.signal)
    .then((reason) => { if (reason !== "left") put(state, "ended"); })
    .catch((error) => { put(state, "ended"); screen.fail(error, end); });
}

/** The characters of bytes in hex; what is none is a dot. */
function ascii(hex) {
  let text = "";
  for (let at = 0; at < hex.length; at += 2) {
    const code = parseInt(hex.slice(at, at + 2), 16);
    text += code >= 32 && code < 127 ? String.fromCharCode(code) : ".";
  }
  return text;
}

// The frames of an uploaded capture.

import * as api from "../api.js";
import { conversationChip, filterForm } from "../analyzer/filters.js";
import { framesView } from "../analyzer/frames_view.js";
import { el, emptyState, notice, put } from "../dom.js";
import { count, name, plural, protocolName, size, time } from "../format.js";
import { plainTable } from "../table.js";
import { framesOf, totals } from "./analyzer.js";

const PAGE = 500;
const FAR = 20_000; // a frame that is farther in the capture is shown without those before it
const POLL_MS = 500;

export async function show(screen) {
  const path = api.apiPath("/v1/analyses", screen.params.id);
  const analysis = await api.get(path, {}, screen.signal);
  const head = screen.heading(name(analysis.name || "Capture"), { back: [["Protocol analyzer", "#/analyzer"]] });
  // Not waited for: the screen shows what happens meanwhile.
  wait(screen, path, analysis)
    .then((done) => (done ? present(screen, path, done, head) : null))
    .catch((error) => screen.fail(error));
}

const DOING = { receiving: "Receiving…", waiting: "Waiting for its turn…", running: "Reading the capture…" };

/** The analysis when it is done; null if the screen is left before. */
async function wait(screen, path, first) {
  const progress = el("div", { "aria-live": "polite" });
  screen.root.append(progress);
  let analysis = first;
  while (analysis.state in DOING) {
    put(progress, notice("info", DOING[analysis.state]));
    await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
    if (screen.signal.aborted) return null;
    analysis = await api.get(path, {}, screen.signal);
  }
  progress.remove();
  return analysis;
}

async function present(screen, path, analysis, head) {
  if (analysis.state === "failed") {
    screen.root.append(notice("bad", name(analysis.error)), el("p", {}, el("a", { href: "#/analyzer" }, "Analyze another file")));
    return;
  }
  head.querySelector(".screen-title").append(el("p", { class: "subtitle" }, `${totals(analysis)} · ${size(analysis.size_bytes)}`));
  for (const note of analysis.notes) screen.root.append(notice("warn", name(note)));
  const { connections } = await api.get(`${path}/connections`, {}, screen.signal);
  const isEmpty = framesOf(analysis) === 0;
  screen.root.append(connectionsPanel(screen, connections, isEmpty));
  if (isEmpty) {
    screen.root.append(emptyState("There are no frames in it.", connections.length
      ? "Its connections use other protocols, or ports that the hub does not know: upload it again and name their protocols."
      : "It has no TCP connections."));
    return;
  }
  frames(screen, path, analysis, connections);
}

function connectionsPanel(screen, connections, isOpen) {
  const kinds = [...new Set(connections.map((each) => protocolName(each.protocol) || "unknown"))].join(", ");
  return el("details", { class: "panel more", open: isOpen },
    el("summary", {}, el("h2", {}, plural(connections.length, "connection")), el("span", {}, kinds ? ` ${kinds}` : "")),
    plainTable({
      caption: "Connections of the capture",
      rows: connections,
      columns: [
        { title: "No.", cell: (row) => count(row.number) },
        { title: "Protocol", cell: (row) => protocolName(row.protocol) || el("span", { class: "muted" }, "unknown") },
        { title: "Client", cell: (row) => name(row.client || row.name) },
        { title: "Server", cell: (row) => name(row.server || "–") },
        { title: "Frames", number: true, cell: (row) => (row.frames
          ? el("a", { href: `#/analyzer/captures/${encodeURIComponent(screen.params.id)}?connection=${row.number}` }, count(row.frames)) : "0") },
        { title: "Violations", number: true, cell: (row) => (row.violations ? el("span", { class: "tag bad" }, count(row.violations)) : "0") },
        { title: "Bytes", number: true, cell: (row) => size(row.forward_bytes + row.backward_bytes) },
        { title: "First packet", hide: true, cell: (row) => time(row.first, { millis: true }) },
        { title: "", cell: (row) => [
          row.late ? el("span", { class: "tag warn", title: "Its beginning was not captured" }, "late") : null, " ",
          row.missing_bytes ? el("span", { class: "tag warn" }, `${size(row.missing_bytes)} missing`) : null, " ",
          row.unread_bytes ? el("span", { class: "tag warn" }, `${size(row.unread_bytes)} unread`) : null, " ",
          row.end === "reset" ? el("span", { class: "tag" }, "reset") : null] },
      ],
      empty: emptyState("There are no TCP connections in it."),
    }));
}

function frames(screen, path, analysis, connections) {
  const rows = [];
  let cursor = "";
  let isLoading = false;
  let isComplete = false;
  let version = 0;
  const chip = el("div", {});

  const filters = filterForm(screen, [
    { name: "protocol", label: "Protocol", options: [["", "any"], ...Object.entries(analysis.protocols).map(([each, number]) => [each, `${protocolName(each)} (${count(number)})`])] },
    { name: "connection", label: "Connection", options: [["", "any"], ...connections.filter((each) => each.frames).map((each) => [String(each.number), `${each.number}: ${each.client || each.name}`])] },
    { name: "frame", label: "Frame", options: [["", "any"], ...Object.entries(analysis.frames).map(([each, number]) => [each, `${protocolName(each)} (${count(number)})`])] },
    { name: "destination", label: "Destination contains" },
    { name: "text", label: "Text in fields or bytes", wide: true },
    { name: "violations", label: "Violations only", check: true },
  ], restart);

  const byNumber = new Map(connections.map((each) => [String(each.number), each.name]));
  const view = framesView(screen, {
    rows,
    more,
    withConnection: connections.length > 1,
    describeConnection: (number) => byNumber.get(number),
    detail: (row) => api.get(`${path}/frames/${row.number}`, {}, screen.signal),
    follow: (frame) => {
      const shared = frame.conversation.startsWith("=");
      screen.setQuery({ conversation: frame.conversation, connection: shared ? "" : frame.connection, n: frame.number, field: "" });
      screen.reload();
    },
  });
  screen.root.append(filters, chip, view.root);

  function chosen() {
    const { protocol, connection, frame, destination, text, violations, conversation } = screen.query;
    return { protocol, connection, frame, destination, text, violations, conversation };
  }

  async function restart({ after = 0 } = {}) {
    version += 1;
    rows.length = 0;
    cursor = "";
    isComplete = false;
    isLoading = false;
    put(chip, conversationChip(screen, () => {
      screen.setQuery({ conversation: "", connection: "" });
      screen.reload();
    }));
    view.restart();
    await more(after);
  }

  async function more(after = 0) {
    if (isLoading || isComplete) return;
    isLoading = true;
    const own = version;
    try {
      const page = await api.get(`${path}/frames`, { ...chosen(), limit: PAGE, cursor, after: cursor ? "" : after || "" }, screen.signal);
      if (own !== version) return;
      rows.push(...page.frames);
      cursor = page.next;
      isComplete = cursor === "";
      view.list.grow(rows.length);
      showStatus(after);
    } catch (error) {
      isComplete = true;
      screen.fail(error, view.status);
    } finally {
      if (own === version) isLoading = false;
    }
  }

  function showStatus(after) {
    const from = after ? ` from frame ${count(after + 1)} on` : "";
    if (rows.length === 0) {
      put(view.status, "No frame matches the filters. ", el("a", { href: `#/analyzer/captures/${encodeURIComponent(screen.params.id)}` }, "Show all frames"));
    } else put(view.status, isComplete ? `${plural(rows.length, "frame")}${from}` : `${count(rows.length)} frames${from}, more when you scroll`);
    if (after) put(view.note, notice("info", `Frames before ${count(after + 1)} are left out. `, el("a", { href: `#/analyzer/captures/${encodeURIComponent(screen.params.id)}` }, "From the beginning")));
  }

  begin();

  /** Shows the frame that the URL names, and what is around it. */
  async function begin() {
    const number = Number(screen.query.n ?? 0);
    const key = screen.query.field ?? "";
    await restart({ after: number > FAR ? number - 100 : 0 });
    if (!number) return;
    while (!isComplete && (rows.at(-1)?.number ?? number) < number) await more();
    const index = rows.findIndex((row) => row.number === number);
    if (index >= 0) view.choose(index, { key, isFirst: true });
    else if (rows.length) {
      const frame = await api.get(`${path}/frames/${number}`, {}, screen.signal).catch(() => null);
      if (frame) view.showDetail(frame, key, true);
    }
  }
}

// Where analyzing begins: upload a capture, return to one, or watch a live connection.

import * as api from "../api.js";
import { openDialog } from "../dialog.js";
import { el, emptyState, notice, put, uniqueId } from "../dom.js";
import { ago, count, name, nameLink, plural, protocolName, size, visible } from "../format.js";
import { toFrames } from "../links.js";
import { go, href } from "../router.js";
import { serverTable } from "../table.js";

const PROTOCOLS = [["", "a capture, or recognize it"], ["emp", "raw EMP"], ["emqp", "raw eMQP"],
  ["relink", "raw Relink"], ["epoxy", "raw Epoxy"], ["micromsg2", "raw MicroMsg2"]];
const SENDERS = {
  emp: ["client", "server"], emqp: ["client", "worker", "scheduler", "admin", "publisher", "subscriber", "broker"],
  relink: ["connector", "listener"], epoxy: ["client", "server"], micromsg2: ["client", "server"],
};

export const toCapture = (id, query) => href("/analyzer/captures/:id", { id }, query);

export async function show(screen) {
  screen.heading("Protocol analyzer", {
    subtitle: "Captures and live connections as frames, fields and bytes; violations with the clause that they break.",
  });
  screen.root.append(uploadPanel(screen), heldPanel(screen), livePanel(screen));
}

// Uploads.

function uploadPanel(screen) {
  const result = el("div", { "aria-live": "polite" });
  const input = el("input", { type: "file", class: "unseen", id: uniqueId("file"), tabindex: "-1", "aria-hidden": "true",
    "aria-label": "Capture file",
    onchange: () => { if (input.files.length) send(input.files[0]); } });
  const protocol = el("select", { id: uniqueId("field"), onchange: showSenders }, PROTOCOLS.map(([value, text]) => el("option", { value }, text)));
  const sender = el("select", { id: uniqueId("field") });
  const senderField = el("div", { class: "field", hidden: true }, el("label", { for: sender.id }, "Sent by"), sender);
  const late = el("input", { type: "checkbox", id: uniqueId("field") });
  const lateField = el("div", { class: "field", hidden: true }, el("label", { class: "check", for: late.id }, late, "It begins inside of a connection"));
  const ports = el("input", { id: uniqueId("field"), type: "text", placeholder: "7000=emp,7001=relink", autocomplete: "off" });

  function showSenders() {
    const roles = SENDERS[protocol.value] ?? [];
    put(sender, roles.map((each) => el("option", { value: each }, each)));
    senderField.hidden = roles.length === 0;
    lateField.hidden = roles.length === 0;
  }

  async function send(file) {
    put(result, notice("info", "Sending ", name(file.name), ` (${size(file.size)})…`));
    const query = { name: file.name.slice(0, 255), protocol: protocol.value, sender: sender.value, late: late.checked ? "true" : "", ports: ports.value.trim() };
    try {
      const made = await api.upload("/v1/analyses", query, file, screen.signal);
      go(toCapture(made.id));
    } catch (error) {
      screen.fail(error, result);
    } finally {
      input.value = "";
    }
  }

  const zone = el("div", {
    class: "drop",
    ondragover: (event) => { event.preventDefault(); zone.classList.add("over"); },
    ondragleave: () => zone.classList.remove("over"),
    ondrop: (event) => {
      event.preventDefault();
      zone.classList.remove("over");
      if (event.dataTransfer.files.length) send(event.dataTransfer.files[0]);
    },
  },
  el("p", {}, el("button", { type: "button", class: "primary", onclick: () => input.click() }, "Choose a capture"), input,
    el("span", { class: "drop-hint" }, " or drop a file here")),
  el("p", { class: "hint" }, "pcap or pcapng, also compressed by gzip or zstd, as Wireshark and tcpdump write them; or the raw bytes of one direction. It is read in a process of its own, masked like the hub's own recordings, shown to you only, and removed 15 minutes after you last looked at it."));

  return el("section", { class: "panel" }, el("h2", {}, "Analyze a capture"), zone, result,
    el("details", { class: "more" }, el("summary", {}, "More about the file"),
      el("div", { class: "filters" },
        el("div", { class: "field" }, el("label", { for: protocol.id }, "The file is"), protocol),
        senderField, lateField,
        el("div", { class: "field wide" }, el("label", { for: ports.id }, "Protocols of other ports"), ports))));
}

// Captures that are held.

const STATES = { receiving: "info", waiting: "info", running: "info", ready: "good", failed: "bad" };

function heldPanel(screen) {
  const table = serverTable(screen, {
    caption: "Your captures",
    load: (query, signal) => api.get("/v1/analyses", query, signal),
    rows: (page) => page.analyses,
    sort: "newest",
    prefix: "held",
    limit: 10,
    refresh_s: 3,
    columns: [
      { title: "File", sort: "name", class: "keep", cell: (row) => nameLink(toCapture(row.id), row.name || row.id) },
      { title: "State", cell: (row) => el("span", { class: `tag ${STATES[row.state]}` }, row.state) },
      { title: "Frames", number: true, cell: (row) => (row.state === "ready" ? count(framesOf(row)) : "–") },
      { title: "Violations", number: true, cell: (row) => (row.violations
        ? el("a", { href: toCapture(row.id, { violations: "true" }), class: "bad-link" }, count(row.violations)) : "0") },
      { title: "Protocols", cell: (row) => Object.keys(row.protocols).map(protocolName).join(", ") || "–" },
      { title: "Size", sort: "size", number: true, cell: (row) => size(row.size_bytes) },
      { title: "Uploaded", sort: "newest", falling: true, cell: (row) => ago(row.created) },
      { title: "", label: "Acts", class: "acts", cell: (row) => el("button", { type: "button", class: "quiet", onclick: () => remove(table, row) }, "Remove…",
        el("span", { class: "unseen" }, ` ${visible(row.name || row.id)}`)) },
    ],
    empty: () => emptyState("You have uploaded nothing yet.", "Choose a capture above. To make one: ",
      el("code", {}, "tcpdump -i any -s 0 -w traffic.pcap tcp port 5040")),
  });
  return el("section", { class: "panel" }, el("h2", {}, "Your captures"), table);
}

export function framesOf(analysis) {
  return Object.values(analysis.protocols).reduce((sum, each) => sum + each, 0);
}

function remove(table, row) {
  openDialog({
    title: "Remove this capture?",
    text: ["The upload ", name(row.name || row.id), " and its frames are removed from the hub. Your file is not touched."],
    action: "Remove",
    danger: true,
    act: async () => {
      await api.del(api.apiPath("/v1/analyses", row.id));
      return "Removed.";
    },
    done: () => table.reload(),
  });
}

// Live connections.

function livePanel(screen) {
  return el("section", { class: "panel" }, el("h2", {}, "Watch a live connection"),
    serverTable(screen, {
      caption: "Live connections",
      load: (query, signal) => api.get("/v1/connections", query, signal),
      rows: (page) => page.connections,
      sort: "id",
      prefix: "live",
      limit: 20,
      keyOf: (row) => row.id,
      filters: [
        { name: "contains", label: "Id, address or client contains", wide: true },
        { name: "protocol", label: "Protocol", options: [["", "any"], ...Object.keys(SENDERS).map((each) => [each, protocolName(each)])] },
      ],
      refresh_s: 5,
      columns: [
        { title: "Connection", sort: "id", cell: (row) => nameLink(toFrames(row.id), row.id, { class: "id" }) },
        { title: "Protocol", cell: (row) => protocolName(row.protocol) },
        { title: "Address", class: "nowrap", cell: (row) => name(row.address) },
        { title: "Client", hide: true, cell: (row) => name(row.client || "–") },
        { title: "User", class: "keep small", cell: (row) => name(row.principal || "–") },
        { title: "Received", sort: "received", number: true, cell: (row) => size(row.received_bytes) },
        { title: "Sent", sort: "sent", number: true, cell: (row) => size(row.sent_bytes) },
      ],
      empty: (isFiltered) => (isFiltered
        ? emptyState("No connection matches.")
        : emptyState("Nobody is connected.", "Connect with ", el("code", {}, "crosswire sub queue/orders"), " or a program of yours.")),
    }),
    el("p", { class: "hint" }, "Frames need the right to administer; of your own connections you may always see them. They are shown from the moment on at which you begin to watch."));
}

/** What is said of frames in a line: "12 frames, 1 violation". */
export function totals(analysis) {
  return `${plural(framesOf(analysis), "frame")}, ${plural(analysis.violations, "violation")}`;
}

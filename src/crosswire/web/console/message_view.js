// How messages are shown: a line of a list, their payload, properties and bytes.

import { toast } from "./dialog.js";
import { el } from "./dom.js";
import { count, name, protocolName, size, time, visible } from "./format.js";
import { connectionLink, destinationLink, messageLink } from "./links.js";
import { plainTable } from "./table.js";

const PREVIEW = 160;
const SHOWN = 400_000;

const OUTCOMES = {
  waiting: "info", held: "info", settled: "good", answered: "good", published: "good", replayed: "good",
  dead: "bad", failed: "bad", dropped: "bad", expired: "warn", unknown: "",
};

/** What became of a message, or a step of it, as a coloured word. */
export function outcomeTag(outcome) {
  const kind = OUTCOMES[outcome] ?? { accepted: "info", delivered: "info", refused: "warn", returned: "warn", damaged: "bad" }[outcome] ?? "";
  return el("span", { class: `tag ${kind}` }, outcome);
}

/** The payload as text: JSON indented, text as it is, bytes as a hex dump; null if it is hidden. */
export function payloadText(message) {
  if (message.hidden) return null;
  if (message.json !== undefined) return JSON.stringify(message.json, null, 2);
  if (typeof message.text === "string") return message.text;
  if (typeof message.base64 === "string") return hexDump(bytesOf(message.base64));
  return "";
}

/** The beginning of a payload, on one line. */
export function preview(message) {
  if (message.hidden) return el("span", { class: "preview" }, "content hidden");
  let text;
  // With spaces, so that it is broken between members.
  if (message.json !== undefined) text = JSON.stringify(message.json, null, 1).replaceAll(/\n\s*/g, " ");
  else if (typeof message.text === "string") text = message.text;
  else text = `${size(message.size_bytes)} of binary data`;
  return el("span", { class: "preview" }, name(text.slice(0, PREVIEW)), text.length > PREVIEW ? "…" : "");
}

/** The orders of a column with times. */
export const BY_TIME = { sort: "newest", falling: true, reverse: ["oldest", "The oldest first"] };

/** Columns of a list of messages; `of(row)` takes the message from a row. `sorted`: by the hub. */
export function messageColumns(of = (row) => row, { destination = false, outcome = null, sorted = false } = {}) {
  return [
    { title: "Message", cell: (row) => messageLink(of(row).id) },
    { title: "Accepted", class: "nowrap", ...(sorted ? BY_TIME : {}), cell: (row) => time(of(row).time) },
    outcome ? { title: "Outcome", cell: (row) => outcomeTag(outcome(row)) } : null,
    destination ? { title: "Destination", class: "keep", cell: (row) => destinationLink(of(row).destination) } : null,
    { title: "Payload", cell: (row) => preview(of(row)) },
    { title: "From", class: "nowrap", hide: true, cell: (row) => [protocolName(of(row).protocol), " ", of(row).connection ? connectionLink(of(row).connection) : name(of(row).principal ?? "")] },
    { title: "Size", number: true, hide: true, cell: (row) => size(of(row).size_bytes) },
  ].filter(Boolean);
}

/** A payload in full, with its type and size, and a button that copies it. */
export function payloadView(message) {
  const text = payloadText(message);
  if (text === null) {
    return el("p", { class: "muted" }, "The content is hidden: seeing it needs the right to consume ", name(message.destination), ".");
  }
  const isBinary = message.json === undefined && typeof message.text !== "string" && typeof message.base64 === "string";
  const isCut = text.length > SHOWN;
  const copy = el("button", { type: "button", class: "quiet", onclick: async () => {
    try {
      await navigator.clipboard.writeText(isBinary ? message.base64 : text);
      toast("good", isBinary ? "Copied as base64." : "Copied.");
    } catch {
      toast("bad", "The browser does not allow to copy on a page without TLS.");
    }
  } }, isBinary ? "Copy as base64" : "Copy");
  return el("div", {},
    el("div", { class: "payload-head" },
      el("span", { class: "muted" }, `${visible(message.content_type || "no content type")} · ${size(message.size_bytes)}${message.truncated ? " · only the beginning" : ""}`), copy),
    el("pre", { class: `payload ${isBinary ? "hex" : ""}`, tabindex: "0", "aria-label": "Payload" },
      text ? el("bdi", {}, visible(text.slice(0, SHOWN), { lines: true })) : el("span", { class: "muted" }, "(empty)"),
      isCut ? `\n… ${count(text.length - SHOWN)} more characters` : ""));
}

/** The names of fields that only its own protocol has; null if there are none. */
export function nativeFields(message) {
  const names = (message.native ?? []).filter((each) => !each.startsWith("crosswire."));
  return names.length ? name(names.join(", ")) : null;
}

/** Properties by name. */
export function propertiesView(properties) {
  const rows = Object.entries(properties ?? {});
  return plainTable({
    caption: "Properties",
    rows,
    empty: el("p", { class: "muted" }, "It has no properties."),
    columns: [
      { title: "Property", cell: ([key]) => name(key) },
      { title: "Value", cell: ([, value]) => name(typeof value === "string" ? value : JSON.stringify(value)) },
      { title: "Type", hide: true, cell: ([, value]) => ({ string: "text", boolean: "boolean" }[typeof value] ?? "number") },
    ],
  });
}

// Bytes.

export function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

export function bytesOfHex(hex) {
  const bytes = new Uint8Array(hex.length / 2);
  for (let index = 0; index < bytes.length; index += 1) bytes[index] = parseInt(hex.substr(index * 2, 2), 16);
  return bytes;
}

/** Lines of sixteen bytes: offset, hex and ASCII. */
export function hexDump(bytes, offset = 0) {
  const lines = [];
  for (let start = 0; start < bytes.length; start += 16) {
    const some = bytes.subarray(start, start + 16);
    const hex = [...some].map((byte) => byte.toString(16).padStart(2, "0"));
    const left = hex.slice(0, 8).join(" ").padEnd(23);
    const right = hex.slice(8).join(" ").padEnd(23);
    const ascii = [...some].map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : "·")).join("");
    lines.push(`${(offset + start).toString(16).padStart(6, "0")}  ${left}  ${right}  ${ascii}`);
  }
  return lines.join("\n");
}

/** A list of facts: [label, value] pairs; those without a value are left out. */
export function facts(pairs, { wide = false } = {}) {
  return el("dl", { class: `facts ${wide ? "wide" : ""}` }, pairs
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value))));
}

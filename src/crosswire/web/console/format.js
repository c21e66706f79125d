// Values for people: local times with UTC on hover, humanised sizes, rates and durations, and
// texts of peers with nothing invisible in them.

import { el } from "./dom.js";

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const THREE = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const DAY = new Intl.DateTimeFormat("en-GB", { year: "numeric", month: "short", day: "numeric" });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

// Control characters, and those that change the direction or the width of what follows.
const INVISIBLE =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const NAMED = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

function escaped(character) {
  return NAMED[character] ?? `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`;
}

/** A text of a peer with its invisible characters as escapes; of a payload (`lines`) those that
 * end a line stay. */
export function visible(text, { lines = false } = {}) {
  return String(text).replace(INVISIBLE, (character) =>
    lines && (character === "\n" || character === "\t") ? character : escaped(character));
}

/** A name or text of a peer: escaped, and isolated from the direction of what is around it. */
export function name(text, attributes = {}) {
  // A long one breaks after a slash, if it can.
  const levels = visible(text).split("/");
  return el("bdi", { class: "name", ...attributes },
    levels.map((level, index) => (index < levels.length - 1 ? [`${level}/`, el("wbr", {})] : level)));
}

/** The table of the configuration for a name: [queues."shop/orders"]. */
export function settingsTable(section, text) {
  return `[${section}.${/^[A-Za-z0-9_-]+$/.test(text) ? text : visible(JSON.stringify(text))}]`;
}

const PROTOCOLS = { emp: "EMP", emqp: "eMQP", relink: "Relink", epoxy: "Epoxy", micromsg2: "MicroMsg2", http: "HTTP" };

/** A protocol as its specification writes it. */
export function protocolName(protocol) {
  return Object.hasOwn(PROTOCOLS, protocol ?? "") ? PROTOCOLS[protocol] : visible(protocol ?? "");
}

/** A link with a name of a peer as its text. */
export function nameLink(href, text, attributes = {}) {
  return el("a", { href, ...attributes }, name(text));
}

/** 1234 → 1,234. */
export function count(value) {
  return value === null || value === undefined ? "–" : NUMBER.format(value);
}

/** A number for a small room: 12,345 → 12.3 k. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size < 10_000) return Number.isInteger(value) ? NUMBER.format(value) : THREE.format(value);
  if (size < 1_000_000) return `${THREE.format(value / 1e3)} k`;
  if (size < 1e9) return `${THREE.format(value / 1e6)} M`;
  return `${THREE.format(value / 1e9)} G`;
}

/** Messages per second: 0.25 → 0.25/s. */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value === 0 ? "0/s" : `${short(value < 0.01 ? 0.01 : value)}/s`;
}

/** 1536 → 1.5 KiB. */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(value) < 1024 || unit === "TiB") {
      return `${unit === "B" ? NUMBER.format(value) : THREE.format(value)} ${unit}`;
    }
    value /= 1024;
  }
  return "";
}

/** Seconds for people: 0.0012 → 1.2 ms, 75 → 1 min 15 s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 0.001) return `${THREE.format(seconds * 1e6)} µs`;
  if (seconds < 1) return `${THREE.format(seconds * 1e3)} ms`;
  if (seconds < 60) return `${THREE.format(seconds)} s`;
  if (seconds < 3600) return pair(seconds, 60, "min", "s");
  if (seconds < 86400) return pair(seconds, 3600, "h", "min");
  return pair(seconds, 86400, "d", "h");
}

function pair(seconds, unit, large, small) {
  const per = { s: 1, min: 60, h: 3600 }[small];
  const whole = Math.floor(seconds / unit);
  const rest = Math.floor((seconds - whole * unit) / per);
  return rest ? `${whole} ${large} ${rest} ${small}` : `${whole} ${large}`;
}

/** A time as text in the browser's zone; only the clock if it is today. */
export function timeText(iso, { millis = false, day = false } = {}) {
  const at = new Date(iso);
  if (Number.isNaN(at.getTime())) return String(iso);
  let clock = CLOCK.format(at);
  if (millis) clock += `.${String(at.getMilliseconds()).padStart(3, "0")}`;
  const isToday = new Date().toDateString() === at.toDateString();
  return isToday && !day ? clock : `${DAY.format(at)} ${clock}`;
}

/** A time: local, with the day and UTC on hover. Null gives a dash. */
export function time(iso, options = {}) {
  if (!iso) return el("span", {}, "–");
  return el("time", { datetime: iso, title: `${iso} (UTC)` }, timeText(iso, options));
}

/** How long ago a time was, with the time on hover. */
export function ago(iso) {
  if (!iso) return el("span", {}, "–");
  const seconds = Math.max((Date.now() - new Date(iso).getTime()) / 1000, 0);
  const text = seconds < 1 ? "now" : `${duration(Math.round(seconds))} ago`;
  return el("time", { datetime: iso, title: `${timeText(iso, { day: true })} · ${iso} (UTC)` }, text);
}

/** "1 message", "2 messages". */
export function plural(number, singular, many = `${singular}s`) {
  return `${count(number)} ${number === 1 ? singular : many}`;
}

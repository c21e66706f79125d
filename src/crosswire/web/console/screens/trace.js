// What happened to a message: its steps as a waterfall over all protocols, its content, its bytes.

import * as api from "../api.js";
import { add, el, emptyState, notice } from "../dom.js";
import { count, duration, name, plural, protocolName, size, time, visible } from "../format.js";
import { connectionLink, deadLettersOf, destinationLink, messageLink, toDeadLetter, toSearch } from "../links.js";
import { bytesOfHex, facts, hexDump, nativeFields, outcomeTag, payloadView, propertiesView } from "../message_view.js";

const STEPS_SHOWN = 500;
const ENDS = new Set(["settled", "refused", "returned", "expired", "answered", "failed", "dead", "dropped", "replayed"]);
const GONE = new Set(["settled", "expired", "dropped", "replayed"]);
const RELATIONS = {
  origin: "It was before", dead_letter: "It became the dead letter", sent_again_as: "It was sent again as", sent_again_from: "It was sent again from",
};

export async function show(screen) {
  const id = screen.params.id;
  const trace = await api.getExact(api.apiPath("/v1/messages", id), {}, screen.signal);
  const message = trace.message;
  screen.heading(`Message ${id}`, {
    back: [["Search", "#/messages"]],
    subtitle: message ? ["in ", destinationLink(message.destination)] : null,
    actions: [letterLink(trace), el("button", { type: "button", onclick: () => screen.reload() }, "Refresh")],
  });
  if (!trace.is_complete) screen.root.append(notice("warn", "There was no time to search everything. Refresh to continue."));
  add(screen.root,
    linksPanel(trace),
    el("section", { class: "panel" }, el("h2", {}, "What happened"), waterfall(trace.steps)),
    el("div", { class: "columns" },
      el("div", {},
        el("section", { class: "panel" }, el("h2", {}, "Payload"), message ? payloadView(message)
          : emptyState("The message itself is gone.", "Neither the store nor the lake has it any more; its steps are still known.")),
        message && !message.hidden ? el("section", { class: "panel" }, el("h2", {}, "Properties"), propertiesView(message.properties)) : null),
      el("div", {}, message ? factsPanel(trace, message) : null)),
    framesPanel(trace));
}

/** Of a dead letter that is still one: where it can be edited and sent again. */
function letterLink(trace) {
  const queue = trace.message ? deadLettersOf(trace.message.destination) : null;
  if (queue === null || trace.steps.some((step) => GONE.has(step.step))) return null;
  return el("a", { class: "button primary", href: toDeadLetter(queue, trace.id) }, "Edit or replay");
}

function linksPanel(trace) {
  if (!trace.links.length) return null;
  return notice("info", trace.links.map((link) => el("div", {}, `${RELATIONS[link.relation]} `, relatedLink(link),
    link.destination ? [" in ", destinationLink(link.destination)] : null, ".")));
}

function relatedLink(link) {
  const queue = link.relation === "dead_letter" ? deadLettersOf(link.destination) : null;
  return queue === null ? messageLink(link.id)
    : [el("a", { href: toDeadLetter(queue, link.id), class: "id" }, String(link.id)), " (edit or replay it)"];
}

function factsPanel(trace, message) {
  return el("section", { class: "panel" }, el("h2", {}, "Facts"), facts([
    ["Destination", destinationLink(message.destination)],
    ["Accepted", time(message.time, { millis: true, day: true })],
    ["Kind", message.kind],
    ["Protocol", protocolName(message.protocol)],
    ["Connection", message.connection ? connectionLink(message.connection) : null],
    ["User", message.principal ? name(message.principal) : null],
    ["Key", message.key ? name(message.key) : null],
    ["Correlation", message.correlation ? el("a", { href: toSearch({ correlation: message.correlation }) }, name(message.correlation)) : null],
    ["Replies go to", message.reply_to ? name(message.reply_to) : null],
    ["On disk before it was acknowledged", message.durable === false ? "no" : "yes"],
    ["Expires", message.expires ? time(message.expires) : null],
    ["Found in", trace.found_in || "memory"],
    ["Fields of its own protocol", nativeFields(message)],
    ["Size", size(message.size_bytes)],
  ]));
}

// The waterfall: each step begins at its time. What it started lasts until the step that ends it:
// acceptance until the first delivery, a delivery until its consumer settled or refused it.
function waterfall(steps) {
  if (!steps.length) return emptyState("No steps are known.", "The ledger no longer has them.");
  const times = steps.map((step) => new Date(step.time).getTime() + microseconds(step.time));
  const first = Math.min(...times);
  const span = Math.max(Math.max(...times) - first, 1e-6);
  const shown = steps.slice(0, STEPS_SHOWN);
  return [
    el("ol", { class: "waterfall" }, shown.map((step, index) => {
      const until = endOf(steps, times, index);
      const left = ((times[index] - first) / span) * 100;
      const width = ((until - times[index]) / span) * 100;
      return stepRow(step, times[index] - first, until - times[index], left, width);
    })),
    steps.length > STEPS_SHOWN ? el("p", { class: "muted" }, `${plural(steps.length - STEPS_SHOWN, "more step")} not shown.`) : null,
  ];
}

// The hub's times have microseconds, JavaScript's only milliseconds.
function microseconds(iso) {
  const digits = /\.(\d+)/.exec(iso)?.[1].padEnd(6, "0") ?? "000000";
  return Number(digits.slice(3, 6)) / 1000;
}

function endOf(steps, times, index) {
  const step = steps[index];
  for (let later = index + 1; later < steps.length; later += 1) {
    const other = steps[later];
    const isSame = other.connection === step.connection && other.subscription === step.subscription;
    if (step.step === "accepted" && other.step === "delivered") return times[later];
    if (step.step === "delivered" && isSame && ENDS.has(other.step)) return times[later];
    if (step.step === "delivered" && isSame && other.step === "delivered") return times[later];
  }
  return times[index];
}

function stepRow(step, after_ms, lasts_ms, left, width) {
  const bar = el("span", { class: `bar ${step.step}` });
  // Through the object model: a style attribute would be refused by the page's policy.
  bar.style.left = `min(${left}%, calc(100% - 3px))`;
  bar.style.width = `${width}%`;
  const meaning = { accepted: "waited for", delivered: "held for" }[step.step];
  return el("li", {},
    el("span", { class: "after" }, el("time", { datetime: step.time, title: `${step.time} (UTC)` }, `+${duration(after_ms / 1000)}`)),
    el("div", { class: "what" }, outcomeTag(step.step), " ",
      step.connection ? [el("span", { class: "tag" }, protocolName(step.protocol)), " ", connectionLink(step.connection), " "] : step.protocol ? [el("span", { class: "tag" }, protocolName(step.protocol)), " "] : null,
      destinationLink(step.destination),
      el("div", { class: "muted" }, joined([
        step.attempt ? `attempt ${step.attempt}` : null,
        step.count > 1 ? `${count(step.count)} deliveries` : null,
        lasts_ms > 0 && meaning ? `${meaning} ${duration(lasts_ms / 1000)}` : null,
        step.subscription ? ["subscription ", name(step.subscription)] : null,
        step.detail ? name(step.detail) : null,
      ]))),
    el("div", { class: "track", "aria-hidden": "true" }, bar));
}

function joined(parts) {
  return parts.filter((part) => part !== null).flatMap((part, index) => (index ? [" · ", part] : [part]));
}

function framesPanel(trace) {
  const panel = el("section", { class: "panel" }, el("h2", {}, "Bytes on the wire"));
  if (!trace.frames.length) {
    panel.append(el("p", { class: "muted" }, "No recorded frame carried it: the tap records connections of the five protocols only, if it is on, a frame can be found some seconds after it passed, and frames need the right to consume."));
    return panel;
  }
  for (const frame of trace.frames) {
    const bytes = bytesOfHex(frame.hex);
    panel.append(el("details", { class: "frame" }, el("summary", {}, outcomeTag(frame.step), " ", el("span", { class: "tag" }, protocolName(frame.protocol)), " ",
      el("b", {}, visible(frame.frame || "frame")), ` ${frame.direction === "forward" ? "from the peer" : "to the peer"}, ${size(frame.length)} at offset ${count(frame.offset)}`),
      el("p", { class: "muted" }, "Connection ", connectionLink(frame.connection), " · ", time(frame.time, { millis: true }),
        frame.has_payload ? "" : " · the nearest frame in time: it does not have the payload as it is",
        bytes.length < frame.length ? ` · the first ${size(bytes.length)}` : ""),
      el("pre", { class: "payload hex", tabindex: "0", "aria-label": "Bytes" }, hexDump(bytes, frame.offset))));
  }
  return panel;
}

// One frame: what it is, what is wrong with it, its fields and its bytes.

import { el, emptyState, notice, put } from "../dom.js";
import { count, name, size, time, visible } from "../format.js";
import { destinationLink } from "../links.js";
import { fieldTree } from "./field_tree.js";
import { FrameRanges, pathName } from "./frame_ranges.js";
import { hexView } from "./hex_view.js";

const KNOWN = /^(queue|topic|service)\//;

/**
 * Shows a frame in an element. `key` is the field that is chosen first; `chosen(key)` is called
 * when another one is; `actions` are elements for the head. Returns a function that ends it.
 */
export function showDetail(root, frame, { key, chosen, actions }) {
  const ranges = new FrameRanges(frame.ranges);
  const head = el("header", { class: "frame-head" },
    el("h2", { tabindex: "-1" }, `Frame ${count(frame.number)}: `, title(frame)),
    el("div", { class: "actions" }, actions));
  const facts = el("p", { class: "frame-facts muted" },
    [arrow(frame), `${count(frame.length)} ${frame.length === 1 ? "byte" : "bytes"} at offset ${count(frame.offset)}`,
      frame.time ? time(frame.time, { millis: true }) : null,
      frame.layer ? "inside a ZMTP message" : null,
      frame.masked ? el("span", { class: "tag info", title: "Secrets are covered by asterisks" }, "secrets masked") : null,
    ].filter((each) => each !== null).flatMap((each, index) => (index ? [" · ", each] : [each])));
  const about = frame.destination
    ? el("p", { class: "frame-facts" }, "About ", KNOWN.test(frame.destination) ? destinationLink(frame.destination) : name(frame.destination))
    : null;
  put(root, head, facts, about, violationNotice(frame.violation));
  let view = null;
  let keepCursor = false;
  const tree = fieldTree({ fields: frame.fields, ranges, hex: frame.hex, choose: (range, picked) => choose(range, picked) });

  function choose(range, picked) {
    tree.mark(picked);
    view?.mark(range, { keepCursor });
    chosen(picked);
  }

  const fields = el("section", { class: "frame-fields" }, el("h3", {}, "Fields"),
    tree.root ?? el("p", { class: "muted" }, frame.violation ? "Bytes that are no frame have no fields." : "This frame has no fields."));
  const bytes = el("section", { class: "frame-bytes" }, el("h3", {}, "Bytes"));
  put(root, head, facts, about, violationNotice(frame.violation), el("div", { class: "frame-parts" }, fields, bytes));
  if (frame.hex) {
    view = hexView({
      hex: frame.hex, ranges, label: `${count(frame.hex.length / 2)} bytes in hex and ASCII`,
      describe: (byte) => { const own = ranges.at(byte); return own ? pathName(own.path) : "no field"; },
      choose: (byte) => {
        const own = ranges.at(byte);
        keepCursor = true;
        if (own) choose(own, tree.keyOf(own));
        else { view.mark(null, { keepCursor: true }); tree.mark(""); }
        keepCursor = false;
      },
    });
    bytes.append(view.root);
    if (frame.hex.length / 2 < frame.length) {
      bytes.append(el("p", { class: "hint" }, `The first ${size(frame.hex.length / 2)} of ${size(frame.length)}.`));
    }
  } else {
    bytes.append(el("p", { class: "muted" }, frame.frame === "gap"
      ? "These bytes are missing in the capture." : "The bytes of this frame were not kept: it is too large."));
  }
  const range = key ? tree.rangeOf(key) : null;
  if (key) tree.mark(key);
  view?.mark(range);
  return () => view?.leave();
}

/** The name of a frame, or what is no frame. */
export function title(frame) {
  if (frame.violation) return el("span", { class: "violation-name" }, visible(frame.violation.error));
  return el("span", {}, visible(frame.frame));
}

/** Who has sent it. */
export function arrow(frame) {
  const isForward = frame.direction === "forward";
  return el("span", { class: "nowrap" }, el("span", { "aria-hidden": "true" }, isForward ? "→ " : "← "),
    `from the ${visible(frame.sender)}`);
}

/** A violation with the clause that it breaks. */
export function violationNotice(violation) {
  if (!violation) return null;
  return notice("bad", el("p", {}, el("strong", {}, "Violation: "), name(violation.reason)),
    violation.clause
      ? el("p", { class: "clause" }, "Breaks ", el("strong", {}, visible(violation.clause)),
        violation.page ? el("span", { class: "muted" }, ` (documentation: ${visible(violation.page)})`) : null)
      : null);
}

/** What is shown before a frame is chosen. */
export function noDetail() {
  return emptyState("No frame is chosen.", "Choose one in the list, by mouse or with the arrow keys.");
}

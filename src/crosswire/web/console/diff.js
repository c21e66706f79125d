// The difference of two texts, line by line.

import { el } from "./dom.js";
import { visible } from "./format.js";

// The table of the longest common subsequence has this many cells at most; longer parts are shown
// as removed and added as a whole.
const MOST_CELLS = 4_000_000;

/** Lines as {kind: "same" | "removed" | "added", text}. */
export function differences(before, after) {
  const old = before.split("\n");
  const fresh = after.split("\n");
  let start = 0;
  while (start < old.length && start < fresh.length && old[start] === fresh[start]) start += 1;
  let end = 0;
  while (end < old.length - start && end < fresh.length - start && old.at(-1 - end) === fresh.at(-1 - end)) end += 1;
  const middle = compare(old.slice(start, old.length - end), fresh.slice(start, fresh.length - end));
  const same = (text) => ({ kind: "same", text });
  return [...old.slice(0, start).map(same), ...middle, ...old.slice(old.length - end).map(same)];
}

function compare(old, fresh) {
  const removed = (text) => ({ kind: "removed", text });
  const added = (text) => ({ kind: "added", text });
  const width = fresh.length + 1;
  if ((old.length + 1) * width > MOST_CELLS) return [...old.map(removed), ...fresh.map(added)];
  const lengths = new Uint32Array((old.length + 1) * width);
  for (let i = old.length - 1; i >= 0; i -= 1) {
    for (let j = fresh.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] = old[i] === fresh[j] ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const found = [];
  let i = 0;
  let j = 0;
  while (i < old.length || j < fresh.length) {
    if (i < old.length && j < fresh.length && old[i] === fresh[j]) {
      found.push({ kind: "same", text: old[i] });
      i += 1;
      j += 1;
    } else if (j >= fresh.length || (i < old.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) {
      found.push(removed(old[i]));
      i += 1;
    } else {
      found.push(added(fresh[j]));
      j += 1;
    }
  }
  return found;
}

/** The difference of two texts; `ins` and `del`, so that it does not depend on colours. */
export function diffView(before, after, label) {
  const lines = differences(before, after);
  return el("pre", { class: "diff", tabindex: "0", "aria-label": label }, lines.map(({ kind, text }) =>
    el({ same: "span", removed: "del", added: "ins" }[kind], { class: kind },
      `${{ same: "  ", removed: "- ", added: "+ " }[kind]}${visible(text)}`)));
}

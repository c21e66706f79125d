// Replays and moves: they may take longer than a request, and are followed until they end.

import * as api from "./api.js";
import { el } from "./dom.js";
import { count, plural, visible } from "./format.js";

const LOOK_MS = 500;

/** Follows a replay until it ends, reporting its progress; gives its result as text. Closing the
 * dialog does not end it: it is listed with the replays. */
export async function followReplay(begun, report, signal, done = "sent again") {
  let state = begun;
  while (state.state === "running") {
    report(el("p", {}, `${count(state.replayed)} ${done} so far, ${count(state.skipped)} skipped. `,
      el("button", { type: "button", class: "quiet", onclick: () => api.del(api.apiPath("/v1/dead/replays", begun.id)).catch(() => {}) }, "Cancel the rest")),
      el("progress", { max: Math.max(state.matched, 1), value: state.replayed + state.skipped, "aria-label": "Progress" }),
      el("p", { class: "muted" }, "It goes on when this is closed: see ", el("a", { href: "#/replays" }, "replays"), "."));
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    state = await api.get(api.apiPath("/v1/dead/replays", begun.id), {}, signal);
  }
  if (state.state === "failed") throw new Error(`It failed after ${count(state.replayed)}: ${visible(state.error)}`);
  return replayResult(state, done);
}

/** What a replay that ended has done. */
export function replayResult(state, done = "sent again") {
  const skipped = state.skipped ? `, ${count(state.skipped)} skipped (${visible(state.error)})` : "";
  const cancelled = state.state === "cancelled" ? " Then it was cancelled." : "";
  return `${plural(state.replayed, "message")} ${done}${skipped}.${cancelled}`;
}

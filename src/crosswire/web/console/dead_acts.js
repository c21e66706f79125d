// What can be done with dead letters: send them again, and delete them.

import * as api from "./api.js";
import { openDialog } from "./dialog.js";
import { el } from "./dom.js";
import { name, plural, visible } from "./format.js";
import { followReplay } from "./replay_progress.js";

/** The filter that letters with a cause pass. */
export function causeFilter(cause) {
  return `dead-cause=T${encodeURIComponent(cause)}`;
}

function described(selection) {
  if (selection.ids) return plural(selection.ids.length, "dead letter");
  return selection.filter ? "the dead letters of this selection" : "all dead letters";
}

/** Asks how to send letters again, and follows it. `selection`: `ids`, `filter` or `all`. */
export function replayDialog(queue, selection, done) {
  const asked = (values, more) => ({ queue, ...selection, destination: values.destination.trim(), ...more });
  openDialog({
    title: `Replay ${described(selection)}`,
    text: el("p", {}, "Each is sent again and removed from the dead letters of ", name(queue), " in one step."),
    fields: [
      { name: "destination", label: "Destination", placeholder: "where each came from", hint: "Empty: back to where it came from." },
      { name: "rate", label: "Letters per second", kind: "number", value: 0, min: 0, hint: "0 for no limit." },
    ],
    action: "Replay",
    dryRun: async (values, report, signal) => {
      const found = await api.post("/v1/dead/replays", asked(values, { dry_run: true }), signal);
      const first = found.ids.slice(0, 10).join(", ");
      return `${plural(found.matched, "letter")} would be sent again${first ? `: ${first}${found.matched > 10 ? ", …" : ""}` : ""}.`;
    },
    act: async (values, report, signal) => {
      const begun = await api.post("/v1/dead/replays", asked(values, { rate: values.rate }), signal);
      return followReplay(begun, report, signal);
    },
    done,
  });
}

/** Asks whether letters shall be deleted, and shows how many were. */
export function purgeDialog(queue, selection, done) {
  openDialog({
    title: `Delete ${described(selection)}`,
    text: el("p", {}, "They can't be brought back. ", selection.filter ? el("span", { class: "muted" }, "Filter: ", el("code", {}, visible(selection.filter))) : null),
    action: "Delete",
    danger: true,
    dryRun: async (values, report, signal) => {
      const found = await api.post("/v1/dead/purge", { queue, ...selection, dry_run: true }, signal);
      return `${plural(found.matched, "letter")} would be deleted.`;
    },
    act: async (values, report, signal) => {
      const found = await api.post("/v1/dead/purge", { queue, ...selection }, signal);
      return `${plural(found.done, "letter")} deleted.`;
    },
    done,
  });
}

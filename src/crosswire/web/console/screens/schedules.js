// Schedules: when they fire next, and to pause, fire, add and remove them.

import * as api from "../api.js";
import { openDialog, toast } from "../dialog.js";
import { el, emptyState } from "../dom.js";
import { count, duration, name, time, timeText, visible } from "../format.js";
import { destinationLink, messageLink } from "../links.js";
import { preview } from "../message_view.js";
import { readPayload, readProperties } from "../publish.js";
import { serverTable } from "../table.js";

export async function show(screen) {
  const administer = screen.session.administer;
  screen.heading("Schedules", {
    subtitle: "A schedule sends its message to a queue or topic again and again.",
    actions: administer ? el("button", { type: "button", onclick: () => add(table) }, "Add a schedule…") : null,
  });
  const table = serverTable(screen, {
    caption: "Schedules",
    load: (query, signal) => api.getExact("/v1/schedules", query, signal),
    rows: (page) => page.schedules,
    sort: "id",
    rowClass: (row) => (row.paused ? "warn" : null),
    filters: [
      { name: "contains", label: "Id contains", wide: true },
      { name: "destination", label: "Destination", placeholder: "queue/reports" },
      { name: "state", label: "State", options: [["", "any"], ["active", "active"], ["paused", "paused"]] },
    ],
    refresh_s: 5,
    columns: [
      { title: "Id", sort: "id", class: "long", cell: (row) => [name(row.id), " ", row.paused ? el("span", { class: "tag warn" }, "paused") : null] },
      { title: "When", class: "when", cell: rule },
      { title: "Next", sort: "due", cell: (row) => (row.next_due ? time(row.next_due) : "–") },
      { title: "Destination", class: "keep", cell: (row) => destinationLink(row.destination) },
      { title: "Message", hide: true, class: "brief", cell: (row) => preview(row.message) },
      { title: "Fired", sort: "fired", number: true, cell: (row) => `${count(row.fired)}${row.run_count ? ` of ${count(row.run_count)}` : ""}` },
      administer ? { title: "", label: "Actions", class: "acts", cell: (row) => buttons(row, table) } : null,
    ].filter(Boolean),
    empty: (isFiltered) => (isFiltered
      ? emptyState("No schedule matches.", el("a", { href: "#/schedules" }, "Show all schedules"))
      : emptyState("There are no schedules.", administer ? "Add one here, or in the configuration: " : "An administrator can add one, ",
        el("code", {}, "crosswire schedule add"))),
  });
  screen.root.append(table);
}

function rule(row) {
  if (row.cron) return [el("code", {}, visible(row.cron)), el("span", { class: "muted" }, " (cron, UTC)")];
  return `every ${duration(row.interval_s)}`;
}

function buttons(row, table) {
  const button = (text, act, kind = null) => el("button", { type: "button", class: kind, onclick: act, "aria-label": `${text.replace("…", "")} ${visible(row.id)}` }, text);
  return el("div", { class: "actions" },
    button(row.paused ? "Resume" : "Pause", () => pause(row, table)),
    button("Fire now…", () => fire(row, table)),
    button("Delete…", () => remove(row, table), "danger"));
}

async function pause(row, table) {
  try {
    const changed = await api.patch(api.apiPath("/v1/schedules", row.id), { paused: !row.paused });
    toast("good", name(row.id), changed.paused ? " is paused. Due times that pass meanwhile are left out." : ` fires next ${timeText(changed.next_due)}.`);
  } catch (error) {
    toast("bad", error.message);
  }
  table.reload();
}

function fire(row, table) {
  openDialog({
    title: "Fire this schedule now",
    text: el("p", {}, "Its message is sent to ", name(row.destination), " once more. Its due times, and its count, stay as they are."),
    action: "Fire",
    act: async () => {
      const sent = await api.post(api.apiPath("/v1/schedules", row.id, "fire"));
      return ["It is sent as message ", messageLink(sent.id), "."];
    },
    done: () => table.reload(),
  });
}

function remove(row, table) {
  openDialog({
    title: "Delete this schedule",
    text: el("p", {}, name(row.id), " fires no more. Messages that it has sent stay. This can't be undone."),
    action: "Delete the schedule",
    danger: true,
    act: async () => {
      await api.del(api.apiPath("/v1/schedules", row.id));
      return ["The schedule ", name(row.id), " is deleted."];
    },
    done: () => table.reload(),
  });
}

function add(table) {
  const timing = (values) => (values.cron.trim() ? { cron: values.cron.trim() } : { interval_s: values.interval_s });
  openDialog({
    title: "Add a schedule",
    fields: [
      { name: "id", label: "Id", hint: "One with the same id is replaced. Empty: the hub chooses one." },
      { name: "destination", label: "Destination", required: true, placeholder: "queue/reports", hint: "queue/NAME or topic/NAME" },
      { name: "interval_s", label: "Every so many seconds", kind: "number", value: 60, min: 0.1 },
      { name: "cron", label: "Or a cron expression, in UTC", placeholder: "0 3 * * *" },
      { name: "kind", label: "Payload is", kind: "select", value: "json", options: [["json", "JSON"], ["text", "text"], ["base64", "bytes in base64"]] },
      { name: "payload", label: "Payload", kind: "area", value: "{}", rows: 3 },
      { name: "properties", label: "Properties", kind: "area", value: "", rows: 2, placeholder: "{\"price\": 12}" },
      { name: "nohaste", label: "The first time after one interval, not at once", kind: "check", value: true },
    ],
    action: "Add",
    dryRun: async (values, report, signal) => {
      const found = await api.post("/v1/schedules/preview", { ...timing(values), nohaste: values.nohaste, count: 5 }, signal);
      return ["It would fire ", found.times.map((each) => timeText(each, { day: true })).join(", "), "…"];
    },
    act: async (values, report, signal) => {
      const added = await api.post("/v1/schedules", {
        id: values.id.trim(), destination: values.destination.trim(), ...timing(values), nohaste: values.nohaste,
        ...readPayload(values.kind, values.payload), properties: readProperties(values.properties),
      }, signal);
      return ["The schedule ", name(added.id), ` fires next ${timeText(added.next_due)}.`];
    },
    done: () => table.reload(),
  });
}

// Search of messages in memory, store and lake.

import * as api from "../api.js";
import { emptyState, el } from "../dom.js";
import { visible } from "../format.js";
import { messageColumns } from "../message_view.js";
import { publishDialog } from "../publish.js";
import { serverTable } from "../table.js";
import { outcomeOptions } from "./queue.js";

// The fields of a browser for times are local; the hub takes UTC.
function toUtc(text) {
  const at = new Date(text);
  return Number.isNaN(at.getTime()) ? text : at.toISOString();
}

export async function show(screen) {
  screen.heading("Search messages", {
    subtitle: "In memory, store and lake. Times are local.",
    actions: el("button", { type: "button", onclick: () => publishDialog("queue/", () => screen.reload()) }, "Publish…"),
  });
  screen.root.append(serverTable(screen, {
    caption: "Messages",
    load: (query, signal) => api.getExact("/v1/messages", query, signal),
    rows: (page) => page.messages,
    keyOf: (row) => row.message.id,
    limit: 50,
    submit: "Search",
    sort: "newest",
    filters: [
      { name: "destination", label: "Destination", placeholder: "queue/orders or topic/prices/#", wide: true },
      { name: "text", label: "Text in payload, key or properties", wide: true },
      { name: "property", label: "Property filter", placeholder: "price > 10" },
      { name: "correlation", label: "Correlation" },
      { name: "outcome", label: "Outcome", options: outcomeOptions() },
      { name: "since", label: "Since", type: "datetime-local", read: toUtc },
      { name: "until", label: "Until", type: "datetime-local", read: toUtc },
    ],
    columns: messageColumns((row) => row.message, { destination: true, outcome: (row) => row.outcome, sorted: true }),
    empty: (isFiltered) => {
      if (!isFiltered) return emptyState("There are no messages yet.", "Publish one, or send one from a program.");
      return emptyState("No message matches.", "Names are compared as they are. ", screen.query.destination && !/^(queue|topic|service)\//.test(screen.query.destination)
        ? `A destination has its kind: queue/${visible(screen.query.destination)}. ` : "",
      "What was settled is known as long as ledger and lake keep it.");
    },
  }));
}

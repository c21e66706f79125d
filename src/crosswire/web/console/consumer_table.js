// Consumers of a queue, of a named subscription or of a connection.

import * as api from "./api.js";
import { count, name, protocolName } from "./format.js";
import { connectionLink, destinationLink } from "./links.js";
import { serverTable } from "./table.js";

/** `of` is `{ queue }`, `{ subscription, owner }` or `{ connection }`; `empty` an element. */
export function consumerTable(screen, of, empty) {
  const who = [
    { title: "Connection", sort: "connection", cell: (row) => connectionLink(row.connection) },
    { title: "Protocol", cell: (row) => protocolName(row.protocol) },
    { title: "User", cell: (row) => name(row.principal || "–") },
  ];
  const what = [{ title: "Destination", sort: "connection", cell: (row) => destinationLink(row.destination) }];
  // An empty owner is nobody, which is not the same as none.
  const path = `/v1/consumers?${new URLSearchParams(of)}`;
  return serverTable(screen, {
    caption: "Consumers",
    load: (query, signal) => api.get(path, query, signal),
    rows: (page) => page.consumers,
    keyOf: (row) => `${row.connection} ${row.destination}`,
    sort: "connection",
    prefix: "consumers-",
    refresh_s: 3,
    columns: [
      ...("connection" in of ? what : who),
      { title: "Holds", sort: "held", number: true, cell: (row) => count(row.held) },
      { title: "Takes more", number: true, cell: (row) => count(row.free) },
      { title: "Weight", number: true, hide: true, cell: (row) => count(row.weight) },
    ],
    empty: () => empty,
  });
}

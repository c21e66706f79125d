// One connection: what it does, what it carries, and its end; open or closed.

import * as api from "../api.js";
import { consumerTable } from "../consumer_table.js";
import { openDialog } from "../dialog.js";
import { el, emptyState, notice, put, tile } from "../dom.js";
import { ago, count, duration, name, protocolName, rate, size, time, visible } from "../format.js";
import { destinationLink, toFrames } from "../links.js";
import { facts } from "../message_view.js";
import { serverTable } from "../table.js";
import { lasted, userLink } from "./connections.js";

export async function show(screen) {
  const { id } = screen.params;
  const path = api.apiPath("/v1/connections", id);
  let row = null;
  try {
    row = await api.get(path, {}, screen.signal);
  } catch (error) {
    if (error.status !== 404) throw error;
    showClosed(await findClosed(screen, id, error));
    return;
  }

  const tag = el("span", {});
  heading(true, tag);
  const tiles = el("div", { class: "tiles" });
  const consumers = consumerTable(screen, { connection: id }, emptyState("It consumes nothing.", "It may send, or call services."));
  const services = serviceTable();
  const about = el("div", {});
  screen.root.append(tiles,
    el("section", { class: "panel" }, el("h2", {}, "What it consumes"), consumers),
    el("section", { class: "panel" }, el("h2", {}, "What it serves"), services),
    el("section", { class: "panel" }, el("h2", {}, "About it"), about));
  showOpen();
  screen.every(2000, async () => {
    try {
      row = await api.get(path, {}, screen.signal);
      showOpen();
    } catch (error) {
      if (error.status === 404) screen.reload();
    }
  });

  function heading(isOpen, subtitle) {
    screen.heading(el("span", { class: "id" }, el("bdi", {}, visible(id))), {
      back: [["Connections", "#/connections"]],
      subtitle,
      actions: [
        isOpen ? el("a", { class: "button", href: toFrames(id) }, "Frames, live") : null,
        isOpen && screen.session.administer ? el("button", { type: "button", class: "danger", onclick: close }, "Close…") : null,
      ],
    });
  }

  function showOpen() {
    put(tag, el("span", { class: "tag good" }, "open"), " ", row.congested ? el("span", { class: "tag warn" }, "congested: it reads more slowly than the hub sends") : null);
    put(tiles,
      tile("Messages in", rate(row.accepted_per_s), `${count(row.accepted)} in all`),
      tile("Messages out", rate(row.delivered_per_s), `${count(row.delivered)} in all`),
      tile("Received", size(row.received_bytes), `silent for ${duration(row.silent_s)}`),
      tile("Sent", size(row.sent_bytes), row.congested ? "congested" : "keeps up", null, row.congested ? "warn" : ""),
      tile("Calls", count(row.calls), "of its own, not answered yet"));
    put(about, aboutFacts(row));
  }

  function serviceTable() {
    return serverTable(screen, {
      caption: "Services that it provides",
      load: (query, signal) => api.get("/v1/services", { connection: id, ...query }, signal),
      rows: (page) => page.services,
      sort: "name",
      prefix: "services-",
      refresh_s: 3,
      columns: [
        { title: "Service", sort: "name", cell: (each) => destinationLink(`service/${each.name}`) },
        { title: "Calls, of all providers", sort: "calls", number: true, cell: (each) => rate(each.calls_per_s) },
        { title: "Waiting", sort: "waiting", number: true, cell: (each) => count(each.waiting) },
        { title: "Providers", number: true, cell: (each) => count(each.provider_count) },
      ],
      empty: () => emptyState("It serves nothing."),
    });
  }

  function showClosed(closed) {
    heading(false, el("span", { class: "tag" }, "closed"));
    screen.root.append(
      notice("info", "It ended ", time(closed.ended), ": ", name(closed.reason)),
      el("div", { class: "tiles" },
        tile("Lasted", duration(lasted(closed)), [time(closed.since), " to ", time(closed.ended)]),
        tile("Messages in", count(closed.accepted), "that it produced"),
        tile("Messages out", count(closed.delivered), "that it got"),
        tile("Received", size(closed.received_bytes)),
        tile("Sent", size(closed.sent_bytes))),
      el("section", { class: "panel" }, el("h2", {}, "About it"), aboutFacts(closed)));
  }

  function close() {
    openDialog({
      title: "Close this connection",
      text: el("p", {}, "The peer gets its protocol's goodbye, and may connect again. Messages that it holds are delivered again, to it or to others."),
      action: "Close the connection",
      danger: true,
      act: async () => {
        await api.del(path);
        return ["The connection ", name(id), " is closed."];
      },
      done: () => screen.reload(),
    });
  }
}

function aboutFacts(row) {
  return facts([
    ["Protocol", protocolName(row.protocol)],
    ["Listener", visible(row.listener)],
    ["Address", visible(row.address)],
    ["Client's own name", row.client ? name(row.client) : "none given"],
    ["User", userLink(row.principal)],
    ["Connected", [time(row.since), " (", ago(row.since), ")"]],
  ]);
}

/** The connection among those that ended. Raises the error of the first request if it is not. */
async function findClosed(screen, id, error) {
  let cursor = "";
  do {
    const page = await api.get("/v1/connections/closed", { contains: id, cursor }, screen.signal);
    const found = page.connections.find((each) => each.id === id);
    if (found) return found;
    cursor = page.next;
  } while (cursor);
  throw error;
}

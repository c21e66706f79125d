// The hub at a glance: rates, backlog, ages, troubles, dead letters, disk, commits, live events.

import * as api from "../api.js";
import { el, emptyState, notice, put } from "../dom.js";
import { count, duration, name, nameLink, plural, protocolName, rate, short, size, time, visible } from "../format.js";
import { connectionLink, destinationLink, toDeadLetters, toQueue, toSubscription } from "../links.js";
import { timeSeries } from "../plot.js";
import { href } from "../router.js";
import { replicasPanel } from "../standby.js";
import { plainTable } from "../table.js";

const PERIODS = { "5m": [300, "5 minutes"], "2h": [7200, "2 hours"], "24h": [86400, "24 hours"] };
const EVENTS_SHOWN = 30;
const LOW_DISK = 0.1;

export async function show(screen) {
  if (!screen.session.observe) return showOwn(screen);
  const period = screen.query.period in PERIODS ? screen.query.period : "5m";
  screen.heading("Overview", { actions: periods(period) });
  const troubles = el("div", {});
  const tiles = el("div", { class: "tiles eight" });
  const plots = makePlots();
  const lists = el("div", { class: "thirds" });
  const copies = el("div", {});
  const events = eventsPanel(screen);
  screen.root.append(troubles, tiles, el("div", { class: "grid" }, plots.map((plot) => el("section", { class: "panel" }, plot.element))),
    lists, copies, events);

  // Measures folders, which may have many files: nothing else waits for it, and sizes after that
  // are those of the time series.
  let disk = null;
  api.get("/v1/disk", {}, screen.signal).then((answer) => { disk = answer.store; }, (error) => {
    if (!screen.signal.aborted) screen.fail(error, troubles);
  });

  async function refresh() {
    const since = new Date(Date.now() - PERIODS[period][0] * 1000).toISOString();
    const [state, stats, oldest] = await Promise.all([
      api.get("/v1/state", {}, screen.signal),
      api.get("/v1/stats", { since: period === "5m" ? "" : since }, screen.signal),
      api.get("/v1/queues", { sort: "age", state: "backlog", limit: 6 }, screen.signal),
    ]);
    showTroubles(troubles, state);
    showTiles(tiles, state, stats, oldest.queues[0] ?? null, disk);
    for (const plot of plots) plot.update(stats);
    return oldest.queues;
  }

  async function refreshLists(oldest) {
    const [dead, busiest] = await Promise.all([
      api.get("/v1/dead", { sort: "length", limit: 6 }, screen.signal),
      api.get("/v1/stats/busiest", { limit: 6 }, screen.signal),
    ]);
    const replicas = screen.session.leader ? await api.get("/v1/replication", {}, screen.signal) : null;
    put(lists, oldestPanel(oldest), deadPanel(dead.queues), busiestPanel(busiest.rows));
    put(copies, replicas ? replicasPanel(replicas) : null);
  }

  await refreshLists(await refresh());
  let turn = 0;
  let isBusy = false;
  screen.every(2500, async () => {
    if (isBusy) return;
    isBusy = true;
    try {
      const oldest = await refresh();
      turn += 1;
      if (turn % 3 === 0) await refreshLists(oldest);
    } catch (error) {
      if (error.status !== 0) screen.fail(error, troubles);
    } finally {
      isBusy = false;
    }
  });
  return undefined;
}

function periods(current) {
  return el("nav", { class: "segments", "aria-label": "Period of the plots" }, Object.entries(PERIODS).map(([key, [, text]]) =>
    el("a", { href: href("/", {}, { period: key === "5m" ? "" : key }), "aria-current": key === current ? "true" : null }, text)));
}

function showTroubles(where, state) {
  const found = [];
  if (state.draining) found.push(notice("warn", "The hub is about to stop."));
  if (!state.store.has_room) found.push(notice("bad", "The disk is full: no messages are accepted, consumers go on."));
  if (state.store.error) found.push(notice("bad", "The last write failed: ", name(state.store.error)));
  for (const text of state.damage) found.push(notice("bad", "Damage: ", name(text)));
  for (const title of state.stopped) found.push(notice("bad", "Nothing is delivered from ", name(title), ": its cursor is damaged."));
  if (state.waiting_for_restart.length) {
    found.push(notice("info", "Changed settings wait for a restart: ", visible(state.waiting_for_restart.join(", ")), "."));
  }
  if (state.reports.length) {
    found.push(el("details", { class: "panel reports" }, el("summary", {}, plural(state.reports.length, "latest error"), " of the hub"),
      el("ul", {}, state.reports.map((text) => el("li", {}, name(text))))));
  }
  const wasOpen = where.querySelector("details")?.open ?? false;
  put(where, found);
  const details = where.querySelector("details");
  if (details) details.open = wasOpen;
}

function tile(label, value, note, { link = null, kind = "" } = {}) {
  return el(link ? "a" : "div", { class: `tile ${kind}`, href: link },
    el("span", { class: "tile-label" }, label), el("span", { class: "tile-value" }, value),
    el("span", { class: "tile-note" }, note));
}

function last(values) {
  return values?.filter((each) => each !== null).at(-1) ?? null;
}

function showTiles(where, state, stats, oldest, disk) {
  const connections = Object.values(state.connections).reduce((sum, each) => sum + each, 0);
  const free = last(stats.series.free_bytes) ?? disk?.free_bytes ?? null;
  const stored = last(stats.series.store_bytes) ?? disk?.size_bytes ?? null;
  const isLow = disk !== null && free !== null && free < disk.total_bytes * LOW_DISK;
  put(where,
    tile("Accepted", rate(state.accepted_per_s), `settled ${rate(state.settled_per_s)}`),
    tile("Waiting", short(state.messages), `in ${plural(state.queues, "queue")}`, { link: href("/queues", {}, { sort: "length" }) }),
    tile("Oldest waiting", oldest ? duration(Math.floor(oldest.oldest_age_s)) : "–",
      oldest ? name(oldest.name) : "nothing waits", { link: oldest ? toQueue(oldest.name) : null }),
    tile("Dead letters", short(state.dead_letters), state.dead_letters ? "show causes" : "none",
      { link: href("/dead"), kind: state.dead_letters ? "bad" : "" }),
    tile("Connections", short(connections), `of at most ${short(state.connections_limit)}`, { link: href("/connections") }),
    tile("Commit", duration(last(stats.series.commit_p99_s)), "99th percentile"),
    tile("Disk free", free === null ? "–" : size(free), stored === null ? "measuring" : `store ${size(stored)}`, { kind: isLow ? "warn" : "" }),
    tile("Running for", duration(Math.floor(state.uptime_s)), ["version ", state.version]));
}

function makePlots() {
  const specs = [
    ["Messages per second", rate, [["accepted", "accepted_per_s", "a"], ["delivered", "delivered_per_s", "d"], ["settled", "settled_per_s", "b"], ["failed", "failed_per_s", "bad"]]],
    ["Waiting messages", short, [["waiting", "messages", "a"], ["dead letters", "dead_letters", "bad"]]],
    ["Commit time", duration, [["50th", "commit_p50_s", "a"], ["99th percentile", "commit_p99_s", "c"]]],
    ["Time to delivery", duration, [["50th", "delivery_p50_s", "a"], ["99th percentile", "delivery_p99_s", "c"]]],
    ["Store and lake", size, [["store", "store_bytes", "a"], ["lake", "lake_bytes", "d"]], true],
    ["Connections and calls", short, [["connections", "connections", "a"], ["calls/s", "calls_per_s", "b"], ["errors/s", "errors_per_s", "bad"]]],
  ];
  return specs.map(([title, format, lines, binary]) => {
    const element = timeSeries({ title, format, binary });
    return {
      element,
      update: (stats) => element.update({ first: stats.first, step_s: stats.step_s,
        lines: lines.map(([label, measure, kind]) => ({ label, kind, values: stats.series[measure] ?? [] })) }),
    };
  });
}

function oldestPanel(queues) {
  return el("section", { class: "panel" }, el("h2", {}, "Oldest backlog", el("a", { href: href("/queues", {}, { sort: "age", state: "backlog" }) }, "all")),
    plainTable({
      caption: "Queues with the oldest messages",
      rows: queues,
      empty: emptyState("No queue has a backlog.", "Messages are consumed as they come."),
      columns: [
        { title: "Queue", cell: (row) => nameLink(toQueue(row.name), row.name) },
        { title: "Oldest", number: true, cell: (row) => duration(Math.floor(row.oldest_age_s)) },
        { title: "Messages", number: true, cell: (row) => count(row.length) },
        { title: "Consumers", number: true, cell: (row) => count(row.consumers) },
      ],
    }));
}

function deadPanel(queues) {
  return el("section", { class: "panel" }, el("h2", {}, "Dead letters", el("a", { href: href("/dead", {}, { sort: "length" }) }, "all")),
    plainTable({
      caption: "Queues with most dead letters",
      rows: queues,
      empty: emptyState("There are no dead letters.", "Messages that can't be delivered would be listed here."),
      columns: [
        { title: "Queue", cell: (row) => nameLink(toDeadLetters(row.queue), row.queue) },
        { title: "Letters", number: true, cell: (row) => count(row.length) },
        { title: "Size", number: true, cell: (row) => size(row.size_bytes) },
      ],
    }));
}

function busiestPanel(rows) {
  return el("section", { class: "panel" }, el("h2", {}, "Busiest now"),
    plainTable({
      caption: "What is busiest now",
      rows,
      empty: emptyState("Nothing has happened within the last seconds.", "Send something: ", el("code", {}, "crosswire pub queue/orders hello")),
      columns: [
        { title: "Name", cell: (row) => (row.kind === "subscription"
          ? nameLink(toSubscription(row.name, row.owner), row.name) : destinationLink(`${row.kind}/${row.name}`)) },
        { title: "In", number: true, cell: (row) => rate(row.rates.accepted) },
        { title: "Delivered", number: true, cell: (row) => rate(row.rates.delivered) },
        { title: "Failed", number: true, cell: (row) => rate(row.rates.failed) },
      ],
    }));
}

// Live events.

function eventsPanel(screen) {
  const list = el("ul", { class: "events" });
  const status = el("span", { class: "tag" }, "connecting");
  const nothing = el("p", { class: "muted" }, "Warnings, connections and changes of state appear here as they happen.");
  const panel = el("section", { class: "panel" }, el("h2", {}, "Live events", status), nothing, list);
  const on = {
    state: (text, isLive) => { put(status, text); status.className = `tag ${isLive ? "good" : "warn"}`; },
    event: (kind, data) => {
      const line = eventLine(kind, data);
      if (line === null) return;
      nothing.hidden = true;
      list.prepend(line);
      while (list.children.length > EVENTS_SHOWN) list.lastChild.remove();
    },
  };
  api.stream("/v1/events", {}, on, screen.signal).catch((error) => screen.fail(error, nothing));
  return panel;
}

function eventLine(kind, data) {
  const line = (tag, ...children) => el("li", {}, time(data.time), " ", el("span", { class: `tag ${tag}` }, kind), " ", children);
  if (kind === "trouble") return line(data.level === "error" ? "bad" : "warn", name(data.text), " ", el("span", { class: "muted" }, name(fieldsText(data.fields))));
  if (kind === "connected") return line("good", connectionLink(data.connection), ` ${protocolName(data.protocol)} from `, name(data.address));
  if (kind === "disconnected") return line("", connectionLink(data.connection), ` ${protocolName(data.protocol)} from `, name(data.address), ": ", name(data.reason));
  if (kind === "lost") return el("li", {}, el("span", { class: "tag warn" }, "lost"), ` ${plural(data.events, "event")} came too fast to show.`);
  if (kind === "state") {
    const { time: at, ...changes } = data;
    return line("info", name(Object.entries(changes).map(([key, value]) => stateText(key, value)).join(" · ")));
  }
  return null;
}

const STATES = {
  leading: ["leads", "is a standby"],
  draining: ["is about to stop", "takes work"],
  has_room: ["has room on the disk", "has no room on the disk"],
};

function stateText(key, value) {
  if (Object.hasOwn(STATES, key)) return STATES[key][value ? 0 : 1];
  const text = Array.isArray(value) ? value.join(", ") || "none" : value;
  return `${key.replaceAll("_", " ")}: ${text}`;
}

function fieldsText(fields) {
  return Object.entries(fields ?? {}).map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(" ");
}

// Without the right to observe: what belongs to the user.

async function showOwn(screen) {
  screen.heading("Overview", { subtitle: "You see what you have rights to. The hub's state needs the right to observe." });
  const [queues, dead, busiest] = await Promise.all([
    api.get("/v1/queues", { sort: "age", limit: 10 }, screen.signal),
    api.get("/v1/dead", { sort: "length", limit: 10 }, screen.signal),
    api.get("/v1/stats/busiest", { limit: 10 }, screen.signal),
  ]);
  screen.root.append(el("div", { class: "thirds" }, oldestPanel(queues.queues), deadPanel(dead.queues), busiestPanel(busiest.rows)));
  return undefined;
}


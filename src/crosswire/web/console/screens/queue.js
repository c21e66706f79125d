// One queue: what waits, what became of earlier messages, who consumes, and what can be done.

import * as api from "../api.js";
import { consumerTable } from "../consumer_table.js";
import { openDialog } from "../dialog.js";
import { el, emptyState, notice, put, tile } from "../dom.js";
import { count, duration, name, plural, rate, settingsTable, short, size, time } from "../format.js";
import { connectionLink, toDeadLetters, toQueue, toSearch, toTail } from "../links.js";
import { facts, messageColumns } from "../message_view.js";
import { timeSeries } from "../plot.js";
import { followReplay } from "../replay_progress.js";
import { go, href } from "../router.js";
import { serverTable } from "../table.js";
import { publishDialog } from "../publish.js";
import { stateTag } from "./queues.js";

const TABS = { recent: "Recent messages", waiting: "Waiting", consumers: "Consumers", policy: "Policy and retries" };

export async function show(screen) {
  const queue = screen.params.name;
  const destination = `queue/${queue}`;
  const path = api.apiPath("/v1/queues", queue);
  const tab = screen.query.tab in TABS ? screen.query.tab : "recent";
  let detail = await api.get(path, {}, screen.signal);

  const title = el("span", {}, name(queue));
  const tag = el("span", {}, stateTag(detail));
  screen.heading(title, { back: [["Queues", "#/queues"]], actions: actions(), subtitle: tag });
  const tiles = el("div", { class: "tiles" });
  const flow = timeSeries({ title: "Messages per second", format: rate });
  const length = timeSeries({ title: "Waiting messages", format: short });
  const content = el("div", {});
  screen.root.append(tiles,
    el("div", { class: "grid" }, el("section", { class: "panel" }, flow), el("section", { class: "panel" }, length)),
    el("nav", { class: "tabs", "aria-label": "Parts of this queue" }, Object.entries(TABS).map(([key, text]) =>
      el("a", { href: toQueue(queue, { tab: key === "recent" ? "" : key }), "aria-current": key === tab ? "page" : null }, text,
        key === "consumers" ? ` (${count(detail.consumer_count)})` : ""))),
    content);

  function showFacts() {
    put(tag, stateTag(detail), detail.stopped ? [" ", name(detail.stopped)] : null);
    put(tiles,
      tile("Waiting", short(detail.length), size(detail.size_bytes)),
      tile("Held", short(detail.held), "by consumers"),
      tile("Oldest", detail.oldest ? duration(Math.floor(detail.oldest_age_s)) : "–", detail.oldest ? time(detail.oldest) : "nothing waits"),
      tile("In", rate(detail.rates.accepted), `delivered ${rate(detail.rates.delivered)}`),
      tile("Settled", rate(detail.rates.settled), `failed ${rate(detail.rates.failed)}`),
      tile("Dead letters", short(detail.dead_letters), detail.dead_letters ? "show causes" : "none", toDeadLetters(queue), detail.dead_letters ? "bad" : ""));
  }

  async function showPlots() {
    const stats = await api.get("/v1/stats", { destination }, screen.signal);
    const line = (label, measure, kind) => ({ label, kind, values: stats.series[measure] ?? [] });
    flow.update({ ...stats, lines: [line("accepted", "accepted_per_s", "a"), line("delivered", "delivered_per_s", "d"), line("settled", "settled_per_s", "b"), line("failed", "failed_per_s", "bad")] });
    length.update({ ...stats, lines: [line("waiting", "length", "a")] });
  }

  showFacts();
  await showPlots();
  const list = { recent, waiting, consumers, policy }[tab]();
  content.append(list);
  screen.every(3000, async () => {
    try {
      detail = await api.get(path, {}, screen.signal);
      showFacts();
      await showPlots();
    } catch (error) {
      if (error.status === 404) screen.fail(error, content);
    }
  });

  function recent() {
    return serverTable(screen, {
      caption: "Recent messages, whatever became of them",
      load: (query, signal) => api.getExact("/v1/messages", { destination, ...query }, signal),
      rows: (page) => page.messages,
      keyOf: (row) => row.message.id,
      limit: 25,
      submit: "Search",
      sort: "newest",
      filters: [
        { name: "text", label: "Text in payload or properties", wide: true },
        { name: "outcome", label: "Outcome", options: outcomeOptions() },
      ],
      tools: el("a", { class: "button", href: toSearch({ destination }) }, "Search with more"),
      columns: messageColumns((row) => row.message, { outcome: (row) => row.outcome, sorted: true }),
      empty: (isFiltered) => emptyState(isFiltered ? "No message matches." : "This queue has had no messages yet.",
        isFiltered ? "Messages that were settled are known as long as ledger and lake keep them." : "Publish one to see it here."),
    });
  }

  function waiting() {
    const mayAct = screen.session.administer;
    const table = serverTable(screen, {
      caption: "Messages that wait, the oldest first",
      load: ({ limit, after }, signal) => api.getExact(path, { messages: limit, after }, signal),
      rows: (page) => page.messages,
      cursor: "after",
      limit: 25,
      columns: [...messageColumns(), { title: "Held by", cell: (row) => (row.held_by ? connectionLink(row.held_by) : "–") }],
      actions: mayAct ? (chosen, done) => [
        el("button", { type: "button", onclick: () => move(chosen.map((row) => row.id), done) }, "Move…"),
        el("button", { type: "button", class: "danger", onclick: () => purge(chosen.map((row) => row.id), done) }, "Delete…"),
      ] : null,
      empty: () => emptyState("Nothing waits in this queue.", "Recent messages shows what became of earlier ones."),
    });
    return table;
  }

  function consumers() {
    return consumerTable(screen, { queue },
      emptyState("Nobody consumes this queue.", "Subscribe a program, or try ", el("code", {}, "crosswire sub ", name(destination)), "."));
  }

  function policy() {
    const { retry, ...rest } = detail.policy;
    const limit = (value, format) => (value ? format(value) : "no limit");
    return el("div", { class: "columns" },
      el("section", { class: "panel" }, el("h2", {}, "Limits"), facts([
        ["Messages at most", limit(rest.max_length, count)],
        ["Bytes at most", limit(rest.max_bytes, size)],
        ["When it is full", rest.overflow === "refuse" ? "producers are refused" : "the oldest are dropped"],
        ["Messages live", rest.ttl_s ? duration(rest.ttl_s) : "for ever"],
        ["In memory at most", `${plural(rest.window_messages, "message")}, ${size(rest.window_bytes)}`],
      ])),
      el("section", { class: "panel" }, el("h2", {}, "Retries"), facts([
        ["Attempts before it is a dead letter", retry.max_attempts ? count(retry.max_attempts) : "no limit"],
        ["First delay", duration(retry.first_delay_s)],
        ["Longest delay", duration(retry.longest_delay_s)],
        ["Jitter", `${Math.round(retry.jitter * 100)} %`],
        ["Lease", retry.lease_s ? duration(retry.lease_s) : "as long as the connection lives"],
      ]), el("p", { class: "muted" }, "Set in the configuration, in ", el("code", {}, settingsTable("queues", queue)), ".")));
  }

  // What can be done.

  function actions() {
    const administer = screen.session.administer;
    const button = (text, act, danger = false) => el("button", { type: "button", class: danger ? "danger" : null, onclick: act }, text);
    return [
      el("a", { class: "button", href: toTail(destination) }, "Live tail"),
      button("Publish…", () => publishDialog(destination, () => screen.reload())),
      administer ? button(detail.paused ? "Resume" : "Pause…", pause) : null,
      administer ? button("Move…", () => move(null, () => screen.reload())) : null,
      administer ? button("Purge…", () => purge(null, () => screen.reload()), true) : null,
      administer ? button("Delete…", remove, true) : null,
    ];
  }

  function pause() {
    const paused = !detail.paused;
    openDialog({
      title: el("span", {}, paused ? "Pause " : "Resume ", name(queue)),
      text: paused ? el("p", {}, "Nothing is delivered from it until it is resumed. Messages are accepted all the same. It outlives restarts.")
        : el("p", {}, "Its consumers get messages again."),
      action: paused ? "Pause" : "Resume",
      act: async () => {
        await api.patch(path, { paused });
        return paused ? "The queue is paused." : "The queue delivers again.";
      },
      done: () => screen.reload(),
    });
  }

  function move(ids, done) {
    openDialog({
      title: ids ? `Move ${plural(ids.length, "message")}` : el("span", {}, "Move all messages of ", name(queue)),
      text: el("p", {}, "Each is sent to the destination and removed here in one step. What consumers hold stays."),
      fields: [
        { name: "destination", label: "Destination", required: true, placeholder: "queue/parked", hint: "A queue or a topic." },
        { name: "filter", label: "Only those that pass a filter", placeholder: "price > 10", hint: ids ? "Not with chosen messages." : "On properties; empty for all.", disabled: Boolean(ids) },
        { name: "rate", label: "Messages per second", kind: "number", value: 0, min: 0, hint: "0 for no limit." },
      ],
      action: "Move",
      dryRun: async (values, report, signal) => {
        const found = await api.post(`${path}/move`, { ...selection(ids, values), destination: values.destination, rate: 0, dry_run: true }, signal);
        return `${plural(found.matched, "message")} would be moved.`;
      },
      act: async (values, report, signal) => {
        const begun = await api.post(`${path}/move`, { ...selection(ids, values), destination: values.destination, rate: values.rate }, signal);
        return followReplay(begun, report, signal, "moved");
      },
      done,
    });
  }

  function selection(ids, values) {
    if (ids) return { ids };
    return values.filter ? { filter: values.filter } : { all: true };
  }

  function purge(ids, done) {
    openDialog({
      title: ids ? `Delete ${plural(ids.length, "message")}` : el("span", {}, "Purge ", name(queue)),
      text: el("p", {}, ids ? "They can't be brought back." : ["All messages of ", name(queue), " that no consumer holds are deleted. They can't be brought back."]),
      fields: ids ? [] : [{ name: "filter", label: "Only those that pass a filter", placeholder: "price > 10", hint: "On properties; empty for all." }],
      action: "Delete messages",
      danger: true,
      dryRun: async (values, report, signal) => {
        const found = await api.post(`${path}/purge`, { ...selection(ids, values), dry_run: true }, signal);
        return `${plural(found.matched, "message")} would be deleted.`;
      },
      act: async (values, report, signal) => {
        const found = await api.post(`${path}/purge`, selection(ids, values), signal);
        const held = found.matched - found.purged;
        return `${plural(found.purged, "message")} deleted${held > 0 ? `, ${count(held)} kept that consumers hold` : ""}.`;
      },
      done,
    });
  }

  function remove() {
    openDialog({
      title: el("span", {}, "Delete ", name(queue)),
      text: [
        el("p", {}, "Only an unused queue can be deleted: without messages, consumers, schedules and configuration."),
        detail.length || detail.consumer_count ? notice("warn", "It has ", plural(detail.length, "message"), " and ", plural(detail.consumer_count, "consumer"), ".") : null,
      ],
      action: "Delete the queue",
      danger: true,
      act: async () => {
        await api.del(path);
        return ["The queue ", name(queue), " is deleted."];
      },
      done: () => go(href("/queues")),
    });
  }
}

/** What can become of messages, for a filter. */
export function outcomeOptions() {
  const words = ["waiting", "held", "settled", "dead", "expired", "dropped", "replayed", "published", "answered", "failed"];
  return [["", "any"], ...words.map((word) => [word, word])];
}

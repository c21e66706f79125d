// One named subscription: its lag over time, its consumers, and its end.

import * as api from "../api.js";
import { consumerTable } from "../consumer_table.js";
import { openDialog } from "../dialog.js";
import { el, emptyState, put, tile } from "../dom.js";
import { ago, count, duration, name, plural, rate, short, time } from "../format.js";
import { messageLink, toDeadLetters, toUser } from "../links.js";
import { facts } from "../message_view.js";
import { timeSeries } from "../plot.js";
import { go, href } from "../router.js";
import { lagText, ownerLink, patternLink, stateTag } from "./subscriptions.js";

export async function show(screen) {
  const { params: { name: subscription }, query: { owner = "" }, session } = screen;
  // An empty owner, nobody, is not the same as none, the user who asks: it has to be sent.
  const ownedBy = `owner=${encodeURIComponent(owner)}`;
  const path = `${api.apiPath("/v1/subscriptions", subscription)}?${ownedBy}`;
  const load = () => api.get(path, {}, screen.signal);
  let row = await load();
  const isOwn = owner === session.user;

  const tag = el("span", {}, stateTag(row));
  screen.heading(el("span", {}, name(subscription)), {
    back: [["Named subscriptions", "#/subscriptions"]],
    subtitle: tag,
    actions: [
      session.administer ? el("button", { type: "button", onclick: assign }, "Give to another user…") : null,
      session.administer || isOwn ? el("button", { type: "button", class: "danger", onclick: remove }, "Delete…") : null,
    ],
  });
  const tiles = el("div", { class: "tiles" });
  const flow = timeSeries({ title: "Messages per second", format: rate });
  const lag = timeSeries({ title: "Lag in messages", format: short });
  const age = timeSeries({ title: "Lag in time", format: duration });
  const consumers = consumerTable(screen, { subscription, owner },
    emptyState("Nobody consumes it now.", "What comes waits until a program subscribes with this name again."));
  const about = el("div", {});
  screen.root.append(tiles,
    el("div", { class: "grid" }, [lag, age, flow].map((plot) => el("section", { class: "panel" }, plot))),
    el("section", { class: "panel" }, el("h2", {}, "Consumers"), consumers),
    el("section", { class: "panel" }, el("h2", {}, "About it"), about));

  function showFacts() {
    put(tag, stateTag(row), row.stopped ? [" ", name(row.stopped)] : null);
    put(tiles,
      tile("Lag", lagText(row), row.lag_is_exact ? "messages not settled" : "messages, an estimate", null, row.lag_messages && !row.consumer_count ? "warn" : ""),
      tile("Lag in time", row.lag_messages ? duration(row.lag_s) : "–", "age of the oldest"),
      tile("Held", short(row.held), "by its consumers"),
      tile("Out", rate(row.rates.delivered), `settled ${rate(row.rates.settled)}`),
      tile("Dead letters", short(row.dead_letters), row.dead_letters ? "show causes" : "none", toDeadLetters(row.dead_letter_queue), row.dead_letters ? "bad" : ""));
    put(about, facts([
      ["Owner", ownerLink(row)],
      ["Topics", patternLink(row.pattern)],
      ["Filter", row.filter ? name(row.filter) : "none"],
      ["Created", [time(row.created), " (", ago(row.created), ")"]],
      ["Settled up to message", row.settled_upto > 0 ? messageLink(row.settled_upto) : "none"],
      ["Newest message of the hub", row.committed ? messageLink(row.committed) : "none"],
    ]));
  }

  async function showPlots() {
    const stats = await api.get(`/v1/stats?${ownedBy}&subscription=${encodeURIComponent(subscription)}`, {}, screen.signal);
    const line = (label, measure, kind) => ({ label, kind, values: stats.series[measure] ?? [] });
    flow.update({ ...stats, lines: [line("delivered", "delivered_per_s", "d"), line("settled", "settled_per_s", "b"), line("failed", "failed_per_s", "bad")] });
    lag.update({ ...stats, lines: [line("not settled", "length", "a")] });
    age.update({ ...stats, lines: [line("oldest", "oldest_age_s", "c")] });
  }

  showFacts();
  await showPlots();
  screen.every(3000, async () => {
    try {
      row = await load();
      showFacts();
      await showPlots();
    } catch (error) {
      screen.fail(error, consumers);
    }
  });

  async function remove() {
    // The backlog as it is now, not as it was shown some seconds ago.
    try {
      row = await load();
    } catch (error) {
      screen.fail(error);
      return;
    }
    showFacts();
    const lost = row.lag_messages ? `${row.lag_is_exact ? "" : "about "}${plural(row.lag_messages, "message")} that it has not settled` : "no waiting message";
    openDialog({
      title: "Delete this subscription",
      text: [
        el("p", {}, "Its position is deleted, and with it ", el("b", {}, lost),
          row.lag_messages ? ` (the oldest is ${duration(row.lag_s)} old)` : "",
          ". Who subscribes with this name again starts anew. This can't be undone."),
        row.dead_letters ? el("p", {}, `${plural(row.dead_letters, "dead letter")} stay in their queue.`) : null,
        row.consumer_count ? el("p", {}, `${plural(row.consumer_count, "consumer")} must leave first: the hub refuses to delete it until then.`) : null,
      ],
      action: "Delete the subscription",
      danger: true,
      act: async () => {
        const gone = await api.del(path);
        return ["The subscription ", name(gone.removed), ` is deleted, with ${gone.lag_is_exact ? "" : "about "}${plural(gone.lag_messages, "message")} that it had not settled.`];
      },
      done: () => go(href("/subscriptions")),
    });
  }

  function assign() {
    let given = "";
    openDialog({
      title: "Give this subscription to another user",
      text: el("p", {}, "Only a subscription that nobody uses can be given away. Its position stays."),
      fields: [{ name: "owner", label: "User", value: row.owner, hint: "Empty for nobody." }],
      action: "Give",
      act: async (values) => {
        given = values.owner.trim();
        await api.patch(path, { owner: given });
        return given ? ["It belongs to ", el("a", { href: toUser(given) }, name(given)), " now."] : "It belongs to nobody now.";
      },
      done: () => go(href("/subscriptions/:name", { name: subscription }, { owner: given })),
    });
  }
}

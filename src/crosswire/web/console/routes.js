// The table of screens: one line each. A screen is a module with `show(screen)`; see main.js.
//
// `title` names the screen; with `group` it is in the navigation. `needs`: "observe" or
// "administer" leaves it out of the navigation for others: the hub would refuse it anyway.

export const ROUTES = [
  { path: "/", title: "Overview", group: "Hub", load: () => import("./screens/overview.js") },
  { path: "/queues", title: "Queues", group: "Messages", load: () => import("./screens/queues.js") },
  { path: "/queues/:name", title: "Queue", load: () => import("./screens/queue.js") },
  { path: "/messages", title: "Search", group: "Messages", load: () => import("./screens/messages.js") },
  { path: "/messages/:id", title: "Message", load: () => import("./screens/trace.js") },
  { path: "/dead", title: "Dead letters", group: "Messages", load: () => import("./screens/dead.js") },
  { path: "/dead/:queue", title: "Dead letters", load: () => import("./screens/dead_queue.js") },
  { path: "/dead/:queue/:id", title: "Dead letter", load: () => import("./screens/dead_letter.js") },
  { path: "/replays", title: "Replays", group: "Messages", load: () => import("./screens/replays.js") },
  { path: "/tail", title: "Live tail", group: "Messages", load: () => import("./screens/tail.js") },
];

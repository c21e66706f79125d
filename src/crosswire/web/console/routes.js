// The table of screens: one line each. A screen is a module with `show(screen)`; see main.js.
//
// `title` names the screen; with `group` it is in the navigation. `needs`: "observe" or
// "administer" leaves it out of the navigation for others: the hub would refuse it anyway.

export const ROUTES = [
  { path: "/", title: "Overview", group: "Hub", load: () => import("./screens/overview.js") },
  { path: "/queues", title: "Queues", group: "Messages", load: () => import("./screens/queues.js") },
  { path: "/analyzer", title: "Protocol analyzer", group: "Traffic", load: () => import("./screens/analyzer.js") },
  { path: "/analyzer/captures/:id", title: "Capture", load: () => import("./screens/analyzer_capture.js") },
  { path: "/analyzer/live/:id", title: "Live frames", load: () => import("./screens/analyzer_live.js") },
  { path: "/queues/:name", title: "Queue", load: () => import("./screens/queue.js") },
  { path: "/messages", title: "Search", group: "Messages", load: () => import("./screens/messages.js") },
  { path: "/messages/:id", title: "Message", load: () => import("./screens/trace.js") },
  { path: "/dead", title: "Dead letters", group: "Messages", load: () => import("./screens/dead.js") },
  { path: "/dead/:queue", title: "Dead letters", load: () => import("./screens/dead_queue.js") },
  { path: "/dead/:queue/:id", title: "Dead letter", load: () => import("./screens/dead_letter.js") },
  { path: "/replays", title: "Replays", group: "Messages", load: () => import("./screens/replays.js") },
  { path: "/tail", title: "Live tail", group: "Messages", load: () => import("./screens/tail.js") },
  { path: "/topics", title: "Topics", group: "Messages", load: () => import("./screens/topics.js") },
  { path: "/topics/:name", title: "Topic", load: () => import("./screens/topic.js") },
  { path: "/subscriptions", title: "Subscriptions", group: "Messages", load: () => import("./screens/subscriptions.js") },
  { path: "/subscriptions/:name", title: "Subscription", load: () => import("./screens/subscription.js") },
  { path: "/services", title: "Services", group: "Traffic", load: () => import("./screens/services.js") },
  { path: "/schedules", title: "Schedules", group: "Traffic", load: () => import("./screens/schedules.js") },
  { path: "/connections", title: "Connections", group: "Traffic", load: () => import("./screens/connections.js") },
  { path: "/connections/:id", title: "Connection", load: () => import("./screens/connection.js") },
  { path: "/users", title: "Users", group: "Administration", load: () => import("./screens/users.js") },
  { path: "/access", title: "Why forbidden?", group: "Administration", load: () => import("./screens/access.js") },
  { path: "/lake", title: "Lake and report", group: "Administration", needs: "observe", load: () => import("./screens/lake.js") },
  { path: "/configuration", title: "Configuration", group: "Administration", needs: "administer", load: () => import("./screens/configuration.js") },
];

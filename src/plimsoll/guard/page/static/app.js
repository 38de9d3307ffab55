// Guard's page: which view is shown, the connection, the token. The token lives in this tab only and travels in a header only.
import { Asker } from "./ask.js";
import { $, fill, make, say } from "./dom.js";
import { EngineView } from "./engine.js";
import { FleetView } from "./fleet.js";
import { Stream } from "./stream.js";

const KEPT = "plimsoll-token";
const fleet = new FleetView();
let engine = null;
let about = null;
// A link may bring the token behind its #, as `plimsoll demo` prints it: browsers send that part to nobody. It leaves the
// address bar at once.
const brought = /^#token=([\x21-\x7e]{1,512})$/.exec(location.hash);
if (brought) {
  sessionStorage.setItem(KEPT, brought[1]);
  history.replaceState(null, "", location.pathname);
}
let token = sessionStorage.getItem(KEPT) || "";
let waiting = []; // events that came since the last frame

const stream = new Stream({
  event(name, data) {
    waiting.push([name, data]);
    if (waiting.length === 1) requestAnimationFrame(take);
  },
  link(state, says) {
    const link = $("link");
    link.className = `link is-${state}`;
    say(link, says);
    if (state === "refused") askForToken(`${says[0].toUpperCase()}${says.slice(1)}.`);
  },
});
const asker = new Asker(() => token, askForToken, () => loadJournal());

function take() {
  const events = waiting;
  waiting = [];
  for (const [name, data] of events) {
    if (name === "fleet") takeFleet(data);
    else if (name === "engine" && engine && data.id === engine.id) engine.take(data);
  }
}

function takeFleet(data) {
  const before = fleet.said;
  fleet.take(data);
  if (fleet.said !== before) say($("announce"), fleet.said);
  const isNew = !about || about.told !== data.about.told;
  about = data.about;
  const troubles = about.troubles.map((one) => `Guard itself: ${one.what}: ${one.text}`);
  if (about.trouble) troubles.unshift(`Guard stopped acting: ${about.trouble}`);
  $("troubles").hidden = !troubles.length;
  fill($("troubles"), ...troubles.map((text) => make("p", {}, make("bdi", {}, text))));
  say($("pause-all"), about.paused ? "Resume guard" : "Pause guard");
  say($("foot"), `plimsoll ${about.version}. Guard looks at each engine every ${about.every_s} s and ${
    about.paused ? "is paused" : about.acting ? "acts" : "only observes"}.`);
  if (isNew) loadJournal();
}

let isLoading = false;
let isAskedAgain = false;
async function loadJournal() {
  if (!engine || !token) return;
  if (isLoading) { isAskedAgain = true; return; }
  isLoading = true;
  const whose = engine;
  try {
    const answer = await fetch(`/journal?engine=${encodeURIComponent(whose.id)}`, {
      headers: { authorization: `Bearer ${token}` }, cache: "no-store", credentials: "omit",
    });
    if (answer.ok) whose.take_journal(await answer.json());
  } catch (problem) {
    if (!(problem instanceof TypeError)) throw problem; // guard is away: the connection says so, and asks again
  }
  await new Promise((done) => setTimeout(done, 1000));
  isLoading = false;
  if (isAskedAgain) { isAskedAgain = false; loadJournal(); }
}

// Which view

function route() {
  const found = /^#\/engine\/(~[0-9a-f]{20})$/.exec(decodeURIComponent(location.hash));
  const id = found ? found[1] : null;
  if (location.hash === "#main") return;
  if (!engine || engine.id !== id) {
    engine = id === null ? null : new EngineView(id, (verb, whom) => asker.ask(verb, whom));
    fill($("main"), engine ? engine.root : fleet.root);
    document.title = engine ? "plimsoll guard: engine" : "plimsoll guard";
    scrollTo(0, 0);
    $("main").focus({ preventScroll: true });
  }
  connect();
}

function connect() {
  if (!token) {
    stream.close();
    $("link").className = "link is-refused";
    say($("link"), "no token");
    fill($("main"), make("section", { class: "panel" }, make("h1", {}, "Token required"),
      make("p", {}, "Guard shows nothing about engines without its token, and does nothing without the one that acts."),
      make("button", { type: "button", class: "main-button", on: { click: () => askForToken("") } }, "Give the token")));
    return;
  }
  const view = engine ? engine.root : fleet.root;
  if (!$("main").contains(view)) fill($("main"), view);
  stream.open(engine ? `/events?engine=${encodeURIComponent(engine.id)}` : "/events", token);
  loadJournal();
}

// The token

function askForToken(says) {
  if ($("ask-dialog").open) $("ask-dialog").close();
  $("token-field").value = "";
  say($("token-says"), says);
  if (!$("token-dialog").open) $("token-dialog").showModal();
  $("token-field").focus();
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token-field").value.trim().replace(/[^\x21-\x7e]/g, "");
  if (!token) { say($("token-says"), "Type the token first."); return; }
  sessionStorage.setItem(KEPT, token);
  $("token-field").value = "";
  $("token-dialog").close();
  connect();
});
$("token-forget").addEventListener("click", () => {
  token = "";
  sessionStorage.removeItem(KEPT);
  $("token-dialog").close();
  connect();
});
$("token-cancel").addEventListener("click", () => $("token-dialog").close());
$("token-button").addEventListener("click", () => askForToken(""));
$("pause-all").addEventListener("click", () => asker.ask(about && about.paused ? "resume" : "pause", null));

// Light and dark: as the machine has it, until somebody says otherwise.
function theme(value) {
  if (value) document.documentElement.dataset.theme = value;
  if (engine) engine.blocks.repaint();
}
theme(sessionStorage.getItem("plimsoll-theme"));
$("theme-button").addEventListener("click", () => {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  sessionStorage.setItem("plimsoll-theme", isDark ? "light" : "dark");
  theme(isDark ? "light" : "dark");
});

addEventListener("hashchange", route);
route();
if (!token) askForToken("");

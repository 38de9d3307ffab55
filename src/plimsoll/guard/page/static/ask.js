// The buttons: each asks first, then posts with the token in a header. Without a token nothing is sent at all.
import { $, fill, make, say } from "./dom.js";

const ABOUT = {
  pause: ["Pause", "Guard takes no action on it until it is resumed. It goes on watching."],
  resume: ["Resume", "Guard acts on it again, and forgets that a restart failed."],
  drain: ["Drain", "It goes out of rotation and takes no new work, for an hour at most. Running requests finish."],
  undrain: ["Put back", "It goes back in rotation."],
  compact: ["Compact", "Torch's unused memory goes back to the device: milliseconds of one step."],
  approve: ["Approve", "Guard judges once more and acts if that is still called for."],
  deny: ["Deny", "Guard does not do it; the journal keeps that you said so."],
  restart: ["Restart", "It is drained, stopped and started again: a minute or more without this engine."],
};

export class Asker {
  constructor(token, askForToken, done) {
    this.token = token; // () => the token, or ""
    this.askForToken = askForToken;
    this.done = done;
    this.wish = null;
    $("ask-no").addEventListener("click", () => $("ask-dialog").close());
    $("ask-yes").addEventListener("click", () => this.send());
    $("ask-dialog").addEventListener("close", () => { this.wish = null; });
  }

  // engine: {id, name}, or null for all of them.
  ask(verb, engine) {
    const [word, text] = ABOUT[verb];
    const whom = engine ? engine.name : "guard, for every engine";
    if (!this.token()) {
      this.askForToken(`To ${word.toLowerCase()} ${whom}, a token is required. Nothing was sent.`);
      return;
    }
    this.wish = { verb, engine };
    fill($("ask-title"), `${word} `, make("bdi", {}, whom), "?");
    say($("ask-text"), text);
    say($("ask-says"), "");
    $("ask-says").classList.remove("good");
    fill($("ask-plan"));
    fill($("ask-yes"), `Yes: ${word.toLowerCase()} `, make("bdi", {}, engine ? engine.name : "everything"));
    $("ask-yes").hidden = false;
    $("ask-yes").disabled = false;
    say($("ask-no"), "No, leave it");
    $("ask-dialog").showModal();
    $("ask-no").focus();
  }

  async send() {
    if (!this.wish) return;
    const { verb, engine } = this.wish;
    const isSwitch = verb === "pause" || verb === "resume";
    const path = isSwitch ? `/v1/${verb}` : engine.approval ? `/v1/approvals/${encodeURIComponent(engine.approval)}/${verb}`
      : `/v1/engines/${encodeURIComponent(engine.id)}/${verb}`;
    $("ask-yes").disabled = true;
    say($("ask-says"), "asked …");
    let told = "guard does not answer: whether it has heard is not known";
    let isDone = false;
    let plan = [];
    try {
      const answer = await fetch(path, {
        method: "POST", credentials: "omit", cache: "no-store",
        headers: { authorization: `Bearer ${this.token()}`, "content-type": "application/json" },
        body: JSON.stringify(isSwitch && engine ? { engine: engine.id } : {}),
      });
      const body = await answer.json();
      isDone = answer.ok && body.accepted === true;
      plan = body.plan || [];
      told = answer.status === 401 ? "Guard rejects this token. Nothing was done."
        : answer.status === 403 ? `Nothing was done: ${body.error}. The buttons need the token that acts.`
          : isDone ? `Accepted. ${body.says}` : `Blocked: ${body.says || body.error}`;
    } catch (problem) {
      if (!(problem instanceof TypeError) && !(problem instanceof SyntaxError)) throw problem;
    }
    say($("ask-says"), told);
    $("ask-says").classList.toggle("good", isDone);
    fill($("ask-plan"), ...plan.map((line) => make("li", {}, line)));
    $("ask-yes").hidden = true;
    say($("ask-no"), "Close");
    $("ask-no").focus();
    this.done(isDone);
  }
}

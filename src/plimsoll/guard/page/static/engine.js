// One engine: its memory, its load and the forecast, active findings, what guard does about them, and what it did.
import { fill, foreign, make, refill, say } from "./dom.js";
import { BlockMap, LedgerBar, TimeChart } from "./charts.js";
import { STATES, count, figure, moment, percent, seconds } from "./words.js";

const RUNG_WORDS = { advice: "advise", shed: "shed", compact: "compact", restart: "drain and restart" };
const FORECASTS = {
  device: "the card's memory runs out", host: "the host's memory runs out", queue: "requests wait too long", kv: "the KV cache is full",
};

function section(title, id, ...children) {
  return make("section", { class: `panel s-${id}`, "aria-labelledby": `t-${id}` }, make("h2", { id: `t-${id}` }, title), ...children);
}

export class EngineView {
  constructor(id, ask) {
    this.id = id;
    this.ask = ask;
    this.data = {};
    this.kv = new TimeChart("KV cache used", "kv", percent, true);
    this.queue = new TimeChart("Queue", "queue", count, false);
    this.blocks = new BlockMap();
    this.build();
  }

  build() {
    this.title = make("h1", {}, "…");
    this.mark = make("span", { class: "mark" });
    this.line = make("p", { class: "about" });
    this.notes = make("div");
    this.buttons = make("div", { class: "row-of-buttons", role: "group", "aria-label": "What guard may be asked to do" });
    this.hand = make("p", { class: "hint" });
    this.figures = make("dl", { class: "tiles" });
    this.ledger = make("div");
    this.bars = new Map(); // by the worker's or the card's name
    this.ledgerMore = make("p", { class: "hint" });
    this.survival = make("div");
    this.rows = new Map(); // of the conditions, by kind
    this.conditionRows = make("tbody");
    this.ladder = make("ol", { class: "ladder" });
    this.ladderSays = make("p", { class: "hint" });
    this.forecasts = make("ul", { class: "plain" });
    this.findings = make("div");
    this.conditions = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of conditions" },
      make("table", { class: "figures" }, make("caption", { class: "only-read" }, "Every condition"),
        make("thead", {}, make("tr", {}, ...["condition", "status", "may lead to", "why", "since"].map((says) => make("th", { scope: "col" }, says)))),
        this.conditionRows));
    this.changes = make("ol", { class: "journal" });
    this.journal = make("ol", { class: "journal" });
    this.journalSays = make("p", { class: "hint" });
    this.root = make("div", { class: "engine" },
      make("p", { class: "back" }, make("a", { href: "#/" }, "← Fleet")),
      make("div", { class: "engine-head" }, this.title, this.mark), this.line, this.notes, this.buttons, this.hand, this.figures,
      section("Active findings, and what to do", "findings", this.findings),
      section("Memory", "memory", this.ledger),
      section("Contained failures", "survival", this.survival),
      section("KV cache and queue over time", "time", this.kv.root, this.queue.root, this.forecasts),
      section("Blocks", "blocks", this.blocks.root),
      section("Escalation", "ladder", this.ladder, this.ladderSays),
      section("What changed", "changes", this.changes),
      section("What guard did", "journal", this.journalSays, this.journal),
      section("Every condition", "conditions", this.conditions));
  }

  take(data) {
    if (data.none) {
      fill(this.root, make("p", { class: "back" }, make("a", { href: "#/" }, "← Fleet")), make("p", { class: "empty" }, data.none));
      return;
    }
    if (data.more) {
      const series = this.data.series;
      for (const name of Object.keys(series)) series[name] = series[name].concat(data.more[name] || []).slice(-1900);
      data.series = series;
      delete data.more;
    }
    Object.assign(this.data, data);
    for (const name of Object.keys(data)) if (this[`on_${name}`]) this[`on_${name}`](this.data[name]);
    if (data.series || data.forecasts || data.figures) this.time();
  }

  on_head(head) {
    fill(this.title, foreign(head.name));
    this.name = head.name;
    say(this.mark, STATES[head.state]);
    this.mark.className = `mark is-${head.state}`;
    fill(this.line, foreign(head.url), " · model ", foreign(head.model ?? "unknown"), " · vLLM ", foreign(head.vllm ?? "unknown"),
      ` · looked at ${head.looked_at === null ? "never" : moment(head.looked_at)} · `,
      head.drain === null ? "gate unknown" : `gate: ${head.ready ? "ready" : "not ready"}, ${head.drain}`);
    const notes = [head.needs, head.note, head.why && `Last look: ${head.why}`];
    fill(this.notes, ...notes.filter(Boolean).map((text) => make("p", { class: "note" }, foreign(text))));
    this.show_buttons(head);
  }

  show_buttons(head) {
    const key = `${head.paused} ${head.drain} ${head.approval}`;
    if (key === this.buttonKey) return;
    this.buttonKey = key;
    const isOut = head.drain !== null && head.drain !== "serving";
    const verbs = [...(head.approval ? [["approve", "Approve"], ["deny", "Deny"]] : []), head.paused ? ["resume", "Resume"] : ["pause", "Pause"], isOut ? ["undrain", "Put back"] : ["drain", "Drain"],
      ["compact", "Compact"], ["restart", "Restart"]];
    const held = document.activeElement;
    const focused = this.buttons.contains(held) ? held.dataset.place : null;
    fill(this.buttons, ...verbs.map(([verb, says], place) => make("button", {
      type: "button", "data-verb": verb, "data-place": place, class: verb === "restart" ? "harm" : null,
      on: { click: () => this.ask(verb, { id: this.id, name: this.name, approval: verb === "approve" || verb === "deny" ? head.approval : "" }) },
    }, says)));
    if (focused !== null) this.buttons.children[focused].focus();
  }

  on_figures(figures) {
    if (!this.figures.children.length) {
      fill(this.figures, ...figures.map((one) => make("div", { class: "tile" }, make("dt", {}, one.says), make("dd"), make("dd", { class: "why" }))));
    }
    figures.forEach((one, place) => {
      const [, value, why] = this.figures.children[place].children;
      say(value, figure(one));
      say(why, one.why.replace(/^unknown: /, ""));
    });
  }

  on_ledger(ledger) {
    const names = ledger.bars.map((bar) => bar.name);
    if (JSON.stringify(names) !== JSON.stringify([...this.bars.keys()]) || ledger.why) {
      this.bars = new Map(names.map((name) => [name, this.bars.get(name) || new LedgerBar()]));
      fill(this.ledger, ledger.why ? make("p", { class: "empty" }, ledger.why) : null, ...[...this.bars.values()].map((one) => one.root), this.ledgerMore);
    }
    for (const bar of ledger.bars) this.bars.get(bar.name).show(bar);
    say(this.ledgerMore, ledger.left_out ? `and ${ledger.left_out} more, with more room than these` : "");
  }

  on_survival(survival) {
    refill(this.survival, make("p", {}, foreign(survival.says)),
      survival.figures.length ? make("dl", { class: "tiles" }, ...survival.figures.map((one) => make("div", { class: "tile" },
        make("dt", {}, one.says), make("dd", {}, figure(one))))) : null,
      survival.last ? make("p", { class: "hint" }, "The last, ", make("time", {}, moment(survival.last.at)), ": ", foreign(survival.last.says)) : null);
  }

  on_blocks(blocks) {
    this.blocks.show(blocks);
  }

  time() {
    const { series, forecasts, figures } = this.data;
    if (!series || !forecasts || !figures) return;
    const ahead = (name, level, says) => {
      const one = forecasts[name];
      return !one || one.unknown !== null || level === null ? null
        : { soonest: one.soonest_s, likely: one.likely_s, latest: one.latest_s, level, says };
    };
    const value = (name) => figures.find((one) => one.name === name).value;
    const [waiting, wait] = [value("waiting"), value("expected_wait")];
    const level = waiting > 0 && wait > 0 ? (waiting * this.data.bound_s) / wait : null;
    this.kv.show(series.t, series.kv, ahead("kv", 1, "it is full"), forecasts.kv && forecasts.kv.unknown);
    this.queue.show(series.t, series.waiting, ahead("queue", level, `requests wait ${seconds(this.data.bound_s)}`),
      forecasts.queue && forecasts.queue.unknown);
  }

  on_forecasts(forecasts) {
    fill(this.forecasts, ...Object.entries(FORECASTS).map(([name, says]) => {
      const one = forecasts[name];
      const text = !one || one.unknown !== null ? `no forecast: ${one ? one.unknown : "unknown"}`
        : `in ${seconds(one.likely_s)} (${seconds(one.soonest_s)} to ${seconds(one.latest_s)})`;
      return make("li", {}, make("strong", {}, says), `: ${text}`);
    }));
  }

  on_ladder(ladder) {
    fill(this.ladder, ...ladder.rungs.map((one, place) => make("li", {
      class: `rung ${one.here ? "is-here" : ""} ${one.doing !== null ? "is-doing" : ""} ${one.off ? "is-off" : ""}`,
      "aria-current": one.here || one.doing !== null ? "step" : null,
    }, make("strong", {}, `${place} ${RUNG_WORDS[one.rung]}`), make("span", {}, one.does), make("span", { class: "rung-state" },
      one.doing !== null ? `in progress${one.undoing ? ", undoing" : ""}: ${one.doing}`
        : one.because.length ? `called for by ${one.because.join(", ")}` : one.off ? "off" : "not called for"))));
    say(this.ladderSays, !ladder.acting ? "This guard only observes: it takes no action. Start it with --act."
      : ladder.paused ? "Paused: guard takes no action on this engine until it is resumed."
        : ladder.called === null ? "No active condition: no action is called for." : `The active conditions call for: ${RUNG_WORDS[ladder.called]}.`);
    say(this.hand, ladder.acting ? "" : "This guard only observes. Start it with --act to use these.");
  }

  on_findings(findings) {
    if (!findings.length) {
      fill(this.findings, make("p", { class: "empty" }, "No active finding."));
      return;
    }
    refill(this.findings, ...findings.map((one) => make("article", { class: `finding is-${one.severity}` },
      make("h3", {}, foreign(one.title), " ", make("code", {}, one.code)), make("p", {}, foreign(one.because)),
      make("h4", {}, "Do"), make("ul", {}, ...one.remedy.map((row) => make("li", {}, make("strong", {}, foreign(row.do)),
        row.flag ? make("code", {}, ` ${row.flag}${row.value ? ` ${row.value}` : ""}`) : null, row.why ? `: ${row.why}` : ""))),
      one.not_a_remedy.length ? make("h4", {}, "No use") : null,
      one.not_a_remedy.length ? make("ul", {}, ...one.not_a_remedy.map((text) => make("li", {}, foreign(text)))) : null,
      evidence(one.evidence, one.code), make("p", { class: "hint" }, `Read on: plimsoll doctor --explain ${one.code}`))));
  }

  on_conditions(conditions) {
    for (const one of conditions) {
      let row = this.rows.get(one.kind);
      if (!row) {
        row = make("tr", {}, make("th", { scope: "row" }, foreign(one.kind)), make("td"), make("td"), make("td", {}, make("bdi")), make("td"));
        this.rows.set(one.kind, row);
        this.conditionRows.append(row);
      }
      row.className = `cond-${one.status}`;
      say(row.children[1], { true: "true", false: "false", unknown: "unknown" }[one.status]);
      say(row.children[2], RUNG_WORDS[one.grade]);
      say(row.children[3].firstChild, one.message);
      say(row.children[4], one.since === null ? "" : moment(one.since));
    }
  }

  on_changes(changes) {
    const rows = changes.slice().reverse().map((one) => make("li", {}, make("time", {}, moment(one.at)), " ", foreign(one.sentence),
      evidence(one.evidence, `${one.at} ${one.sentence}`)));
    refill(this.changes, ...(rows.length ? rows : [make("li", {}, "Nothing has changed since guard started.")]));
  }

  take_journal(body) {
    say(this.journalSays, body.says ? `No journal: ${body.says}.` : body.wrong.length ? `The journal is damaged: ${body.wrong.join("; ")}` : "");
    const rows = body.entries.slice(-100).reverse().map((one) => make("li", {}, make("time", {}, moment(one.at)), " ", foreign(one.sentence),
      details(String(one.number), Object.entries({ number: one.number, kind: one.kind, step: one.step, action: one.action, ...one.fields }))));
    refill(this.journal, ...(rows.length ? rows : [make("li", {}, "No action yet.")]));
  }
}

function evidence(rows, key) {
  return rows.length ? details(key, rows.map((one) => [one.line ? `${one.source}, line ${one.line}` : one.source, one.text])) : null;
}

function details(key, pairs) {
  const rows = pairs.filter(([, value]) => value !== null && value !== "" && value !== undefined)
    .map(([name, value]) => make("div", {}, make("dt", {}, foreign(name)), make("dd", {}, foreign(typeof value === "object" ? JSON.stringify(value) : String(value)))));
  return make("details", { "data-key": key }, make("summary", {}, "evidence"), make("dl", { class: "evidence" }, ...rows));
}

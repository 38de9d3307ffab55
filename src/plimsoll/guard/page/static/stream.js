// One connection to guard that tells of every change, read by hand: only so can the token travel in a header, where no other
// page can put it.

export class Stream {
  constructor(hears) {
    this.hears = hears; // {event(name, data), link(state, says)}
    this.stop = null;
    this.wait = 500;
  }

  open(path, token) {
    this.close();
    const ending = new AbortController();
    this.stop = ending;
    this.run(path, token, ending);
  }

  close() {
    if (this.stop) this.stop.abort();
    this.stop = null;
  }

  async run(path, token, ending) {
    while (!ending.signal.aborted) {
      try {
        await this.read(path, token, ending);
        this.hears.link("lost", "guard closed the connection");
      } catch (problem) {
        if (ending.signal.aborted) return;
        if (problem instanceof Refused) {
          this.hears.link("refused", problem.message);
          return;
        }
        this.hears.link("lost", "guard does not answer");
      }
      if (ending.signal.aborted) return;
      await new Promise((done) => setTimeout(done, this.wait));
      this.wait = Math.min(this.wait * 2, 10000);
    }
  }

  async read(path, token, ending) {
    const answer = await fetch(path, {
      headers: { authorization: `Bearer ${token}` }, signal: ending.signal, cache: "no-store", credentials: "omit",
    });
    if (answer.status === 401) throw new Refused("guard rejects this token");
    if (!answer.ok) throw new Error(`guard answers ${answer.status}`);
    this.hears.link("live", "live");
    this.wait = 500;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let kept = "";
    // Guard speaks at least every ten seconds: who hears nothing for three times as long hears nobody.
    let quiet = setTimeout(() => reader.cancel(), 30000);
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done || ending.signal.aborted) return;
        clearTimeout(quiet);
        quiet = setTimeout(() => reader.cancel(), 30000);
        kept += value;
        let end;
        while ((end = kept.indexOf("\n\n")) >= 0) {
          this.take(kept.slice(0, end));
          kept = kept.slice(end + 2);
        }
      }
    } finally {
      clearTimeout(quiet);
    }
  }

  take(block) {
    let name = "message";
    let data = "";
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (data) this.hears.event(name, JSON.parse(data));
  }
}

export class Refused extends Error {}

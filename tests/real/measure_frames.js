() => {
  window.seen = {frames: [], tasks: [], changes: 0};
  new PerformanceObserver((list) => { for (const one of list.getEntries()) window.seen.tasks.push(one.duration); })
    .observe({type: "longtask"});
  new MutationObserver((list) => { window.seen.changes += list.length; })
    .observe(document.querySelector(".fleet tbody"), {subtree: true, childList: true, characterData: true});
  let last = performance.now();
  const frame = (now) => { window.seen.frames.push(now - last); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
}

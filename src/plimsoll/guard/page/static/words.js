// Numbers in words. What is not known is said to be so.

export const UNKNOWN = "unknown";

export function percent(share) {
  if (share === null || share === undefined) return UNKNOWN;
  const value = share * 100;
  return value > 0 && value < 10 ? `${value.toFixed(1)} %` : `${Math.round(value)} %`;
}

export function count(value) {
  return value === null || value === undefined ? UNKNOWN : Math.round(value).toLocaleString("en");
}

export function gib(bytes) {
  if (bytes === null || bytes === undefined) return UNKNOWN;
  const value = bytes / 2 ** 30;
  return value >= 0.1 || bytes === 0 ? `${value.toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value > 0 && value < 0.95) return value < 0.0095 ? `${(value * 1000).toFixed(1)} ms` : `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function figure(one) {
  const as = { share: percent, count, seconds }[one.unit];
  return one.value === null ? UNKNOWN : as(one.value);
}

// The time of day, and the date where it is another one than today's.
export function moment(unix) {
  if (unix === null || unix === undefined) return "";
  const at = new Date(unix * 1000);
  const clock = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? clock : `${at.toISOString().slice(0, 10)} ${clock}`;
}

export const STATES = {
  person: "needs attention", critical: "critical", gone: "unreachable", warning: "degraded", info: "notice", unknown: "unknown", well: "healthy",
};

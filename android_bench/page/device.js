// What the browser says of the device and of itself, and what that means for a measurement.
// Decides nothing about the device being a phone: the server does, from these signs.

/** The graphics chip's name, null where the browser hides it. */
function graphicsChip() {
  const gl = document.createElement("canvas").getContext("webgl");
  if (!gl) return null;
  const named = gl.getExtension("WEBGL_debug_renderer_info");
  return gl.getParameter(named ? named.UNMASKED_RENDERER_WEBGL : gl.RENDERER) || null;
}

/** What the browser tells of the device. */
export async function signs() {
  const asked = ["model", "platformVersion", "architecture"];
  const high = await navigator.userAgentData?.getHighEntropyValues(asked).catch(() => null);
  return {
    user_agent: navigator.userAgent,
    platform: navigator.platform,
    model: high?.model || null,
    android: high?.platform === "Android" ? high.platformVersion : null,
    webdriver: navigator.webdriver ?? null,
    touch_points: navigator.maxTouchPoints,
    gpu: graphicsChip(),
    screen: `${screen.width} × ${screen.height} × ${devicePixelRatio}`,
  };
}

/** The parts of the result's `device` that are not judged. */
export function device(signs) {
  const android = signs.user_agent.match(/Android ([\d.]+)(?:; ([^;)]+))?/);
  const named = android?.[2]?.trim();
  const hidden = named === "K"; // Chrome says "Android 10; K" of every phone
  return {
    model: signs.model || (named && !hidden ? named : signs.platform || "unknown"),
    abi: signs.platform?.replace("Linux ", "") || "unknown",
    cores: navigator.hardwareConcurrency || null,
    android: signs.android || (hidden ? "10 or later" : android?.[1]) || null,
    ram_bytes: navigator.deviceMemory ? navigator.deviceMemory * 2 ** 30 : null,
    user_agent: signs.user_agent,
    gpu: signs.gpu,
  };
}

/** The conditions that a page may know of. */
export async function conditions() {
  const battery = await navigator.getBattery?.().catch(() => null);
  return {
    battery_percent: battery ? Math.round(battery.level * 100) : null,
    charging: battery ? battery.charging : null,
    screen_on: document.visibilityState === "visible",
  };
}

/** What WebGPU offers here: `{fp16, software}`, or why there is none. */
export async function webGpu() {
  if (!isSecureContext) return { missing: "WebGPU needs a secure page: localhost or https" };
  if (!navigator.gpu) return { missing: "this browser has no WebGPU" };
  const adapter = await navigator.gpu.requestAdapter().catch(() => null);
  if (!adapter) return { missing: "WebGPU finds no graphics chip here" };
  const { vendor = "", architecture = "" } = adapter.info ?? {};
  return {
    fp16: adapter.features.has("shader-f16"),
    software: Boolean(adapter.info?.isFallbackAdapter) || /swiftshader|llvmpipe/i.test(architecture),
    name: `${vendor} ${architecture}`.trim() || "graphics chip",
  };
}

/** Why more than one thread cannot be had; null where it can. */
export function oneThreadOnly() {
  if (!isSecureContext) {
    return "one thread only: over plain http a browser gives a page no more";
  }
  if (!crossOriginIsolated) return "one thread only: this page is not isolated from others";
  return null;
}

/** What limits a measurement here, a sentence each, most weighty first. */
export function limits(gpu, plan, timerUs) {
  const found = [];
  const alone = oneThreadOnly();
  if (alone && !isSecureContext) {
    found.push("One thread and a coarse clock, because the page came over plain http. Over USB, " +
      "with adb reverse and localhost, there are more threads and a clock twenty times finer.");
  } else if (alone) {
    found.push("One thread and a coarse clock, because this page is not isolated from others.");
  }
  if (timerUs) {
    const step = timerUs >= 1000 ? `${timerUs / 1000} ms` : `${Number(timerUs.toPrecision(2))} µs`;
    found.push(`The clock moves in steps of ${step}. Where a run is short beside that, a sample is the mean of several runs.`);
  }
  if (plan.cells.some((cell) => cell.dtype === "fp16")) {
    found.push("WebAssembly has no fp16 arithmetic: fp16 graphs are computed in fp32 with conversions, so fp16 is no faster here. A native app is.");
    if (gpu.fp16 === false) found.push("WebGPU here lacks shader-f16, so it runs no fp16 graph.");
  }
  if (gpu.missing) found.push(`No WebGPU row: ${gpu.missing}.`);
  else found.push("A WebGPU run ends when its result can be read by the page; that waiting is part of its time, and most of it where the graph is small.");
  found.push("A page cannot choose the core it runs on, nor read temperature or clock rate. Several rounds in random order and a last look at the first cell show whether they changed.");
  found.push("WebAssembly uses 128-bit vectors only. Compare browsers with browsers; a native runtime is faster.");
  return found;
}

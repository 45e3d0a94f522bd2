"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);

  // Figures name their colours as CSS variables; plotly wants real ones.
  const resolve = (value, style) => {
    if (typeof value === "string" && value.startsWith("var(--")) return style.getPropertyValue(value.slice(4, -1)).trim();
    if (Array.isArray(value)) return value.map((item) => resolve(item, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, style)]));
    return value;
  };

  const draw = () => {
    const style = getComputedStyle(root);
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
    for (const figure of figures) {
      const layout = resolve(figure.layout, style);
      layout.xaxis = { ...axis, ...layout.xaxis };
      layout.yaxis = { ...axis, ...layout.yaxis };
      layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
      layout.font = { color: ink, family: getComputedStyle(document.body).fontFamily, size: 13 };
      layout.margin = { l: 56, r: 16, t: layout.legend ? 60 : 36, b: 48 };
      layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink };
      layout.hoverlabel = { align: "left" };
      // An explicit list: plotly's own has a button that sends the figure to its makers' server.
      const modeBarButtons = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
      const options = { responsive: true, displaylogo: false, plotlyServerURL: "", modeBarButtons };
      Plotly.react(figure.name, resolve(figure.traces, style), layout, options);
    }
  };

  const show = (theme) => {
    root.dataset.theme = theme;
    draw();
  };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").onclick = () => show(root.dataset.theme === "dark" ? "light" : "dark");
  dark.addEventListener("change", () => show(dark.matches ? "dark" : "light"));
  show(dark.matches ? "dark" : "light");
})();

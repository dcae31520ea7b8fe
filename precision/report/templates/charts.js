const data = JSON.parse(document.getElementById("data").textContent);
const number = (value) => value === null ? null : Number(String(value).replace("inf", "Infinity"));
const positive = (value) => { const found = number(value); return found > 0 && Number.isFinite(found) ? found : null; };
const short = (value) => value === null || value === undefined ? "not measured" : number(value).toPrecision(3);
const scale = (() => {
  const largest = Math.max(data.untouched.bytes, ...data.pareto.map((point) => point.bytes));
  const [size, name] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]].find(([each]) => largest >= each) || [1, "B"];
  return {size, name};
})();
const narrow = () => window.innerWidth < 720;

function theme() {
  const style = getComputedStyle(document.documentElement);
  return new Proxy({}, {get: (_, name) => style.getPropertyValue(`--${name}`).trim()});
}

function layout(colour, more) {
  const axis = {gridcolor: colour.line, linecolor: colour.line, zerolinecolor: colour.line, automargin: true};
  const {xaxis, yaxis, ...rest} = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: colour.sheet, font: {color: colour.ink, size: narrow() ? 11 : 12.5},
    margin: {l: 8, r: 12, t: 8, b: 8}, showlegend: true,
    legend: {orientation: "h", y: -0.22, x: 0, bgcolor: "rgba(0,0,0,0)"},
    hoverlabel: {bgcolor: colour.sheet, bordercolor: colour.line, font: {color: colour.ink, size: 12}, align: "left"},
    xaxis: {...axis, ...xaxis}, yaxis: {...axis, ...yaxis}, ...rest,
  };
}

const powers = {type: "log", exponentformat: "power", dtick: 1};
const errors = (points, high) => points.map(({prediction}) => {
  const middle = number(prediction.error);
  return high ? number(prediction.high) - middle : middle - number(prediction.low);
});

function told(point) {
  const {prediction, words} = point, most = 14;
  const lines = words.length > most ? [...words.slice(0, most), `and ${words.length - most} more`] : words;
  const interval = `${short(prediction.error)} (${short(prediction.low)} to ${short(prediction.high)})`;
  const head = [`${(point.bytes / scale.size).toPrecision(4)} ${scale.name}`, `predicted ${interval}`, `measured ${short(point.measured)}`];
  return [...head, ...lines].join("<br>");
}

function dashed(colour, axis, value, dash) {
  const across = axis === "y" ? {xref: "paper", x0: 0, x1: 1, y0: value, y1: value} : {yref: "paper", y0: 0, y1: 1, x0: value, x1: value};
  return {type: "line", ...across, line: {color: colour, dash, width: 1.5}};
}

function pareto(colour) {
  const visible = data.pareto.filter(({prediction}) => positive(prediction.error));
  const at = (points) => points.map((point) => point.bytes / scale.size);
  const known = visible.filter(({measured}) => positive(measured));
  const {noise_floor: floor, settings: {budgets}, recommended} = data, shapes = [];
  const simple = data.baselines.filter(({measured}) => positive(measured));
  const named = (one) => `${one.name}<br>${(one.bytes / scale.size).toPrecision(4)} ${scale.name}<br>measured ${short(one.measured)}`;
  if (positive(floor)) shapes.push(dashed(colour.floor, "y", number(floor), "dot"));
  if (positive(budgets.error ?? null)) shapes.push(dashed(colour.bad, "y", budgets.error, "dash"));
  if (positive(budgets.bytes ?? null)) shapes.push(dashed(colour.bad, "x", budgets.bytes / scale.size, "dash"));
  const dots = {mode: "markers", hovertemplate: "%{text}<extra></extra>"};
  return [[
    {...dots, name: "predicted, with interval", x: at(visible), y: visible.map((p) => number(p.prediction.error)), text: visible.map(told),
      mode: "lines+markers", line: {color: colour.front, width: 1, dash: "dot"}, marker: {color: colour.front, size: 8},
      error_y: {type: "data", symmetric: false, array: errors(visible, true), arrayminus: errors(visible, false),
        color: colour.front, thickness: 1.4, width: 4}},
    {...dots, name: "measured", x: at(known), y: known.map((p) => number(p.measured)), text: known.map(told),
      marker: {symbol: "x-thin", size: 9, line: {color: colour.ink, width: 1.6}}},
    {...dots, name: "what needs no audit, measured", x: at(simple), y: simple.map((one) => number(one.measured)), text: simple.map(named),
      marker: {symbol: "square-open", size: 9, color: colour.soft, line: {width: 1.6}}},
    {...dots, name: "recommended", x: at([recommended]), y: [positive(recommended.measured) ?? positive(recommended.prediction.error)],
      text: [told(recommended)], marker: {symbol: "diamond", size: 14, color: colour.chosen, line: {color: colour.paper, width: 1.5}}},
  ], layout(colour, {shapes, hovermode: "closest",
    xaxis: {title: {text: `weights, ${scale.name}`}, rangemode: "tozero"}, yaxis: {...powers, title: {text: data.settings.unit}}})];
}

function measured(colour) {
  const inside = ({prediction, measured: value}) => number(value) >= number(prediction.low) && number(value) <= number(prediction.high);
  const usable = (points) => points.filter((p) => positive(p.prediction.error) && positive(p.measured));
  const random = usable(data.calibration), front = usable([...data.pareto, data.recommended]);
  const all = [...random, ...front].sort((a, b) => number(a.prediction.error) - number(b.prediction.error));
  const x = (points) => points.map((p) => number(p.prediction.error)), y = (points) => points.map((p) => number(p.measured));
  const ends = [Math.min(...x(all), ...y(all)) / 1.5, Math.max(...x(all), ...y(all)) * 1.5];
  const bars = all.flatMap(({prediction: p}) => [[number(p.error), number(p.low)], [number(p.error), number(p.high)], [null, null]]);
  const dot = (name, points, symbol) => ({name, mode: "markers", x: x(points), y: y(points),
    text: points.map((p) => `predicted ${short(p.prediction.error)} (${short(p.prediction.low)} to ${short(p.prediction.high)})<br>measured ${short(p.measured)}`),
    hovertemplate: "%{text}<extra></extra>",
    marker: {symbol, size: 8, color: points.map((p) => inside(p) ? symbol === "circle" ? colour.front : colour.chosen : colour.bad), line: {color: colour.paper, width: 1}}});
  return [[
    {name: "95 % interval", mode: "lines", x: bars.map(([a]) => a), y: bars.map(([, b]) => b), hoverinfo: "skip",
      line: {color: colour.band, width: 5}, opacity: 0.55},
    {name: "predicted = measured", mode: "lines", x: ends, y: ends, hoverinfo: "skip", line: {color: colour.soft, width: 1.2}},
    dot("measured to calibrate", random, "circle"),
    dot("front and recommended", front, "diamond"),
  ], layout(colour, {hovermode: "closest", xaxis: {...powers, title: {text: `predicted, ${data.settings.unit}`}}, yaxis: {...powers, title: {text: "measured"}}})];
}

function heat(weights) {
  const wanted = (site) => ["linear", "embedding"].includes(site.place) === weights && Object.keys(site.alone).length > 0;
  const sites = data.sites.filter(wanted).reverse();
  const schemes = [...new Set(data.sites.filter(wanted).flatMap((site) => Object.keys(site.alone)))];
  const label = (site) => site.layer === null ? site.kind : `${site.layer} ${site.kind}`;
  const value = (site, scheme) => { const found = positive(site.alone[scheme] ?? null); return found === null ? null : Math.log10(found); };
  const row = sites.length > 80 ? 11 : 17;
  const all = sites.flatMap((site) => schemes.map((scheme) => value(site, scheme))).filter((found) => found !== null);
  const most = Math.max(...all, -300), least = Math.max(Math.min(...all, most), most - 8); // what is far below the rest is one colour
  return (colour) => [[{
    type: "heatmap", x: schemes, y: sites.map((_, place) => place), z: sites.map((site) => schemes.map((scheme) => value(site, scheme))),
    text: sites.map((site) => schemes.map((scheme) => `${site.name}<br>${scheme}: ${site.alone[scheme] === undefined ? "does not fit" : short(site.alone[scheme])}`)),
    hovertemplate: "%{text}<extra></extra>", colorscale: "Viridis", zmin: least, zmax: most, xgap: 1, ygap: 1,
    colorbar: {title: {text: "log₁₀", side: "top"}, thickness: 12, outlinewidth: 0, len: Math.min(1, 260 / (row * sites.length)), y: 1, yanchor: "top"},
  }], layout(colour, {
    showlegend: false, height: Math.max(row * sites.length + 130, 220),
    width: narrow() ? Math.max(schemes.length * 26 + 210, window.innerWidth - 30) : undefined,
    shapes: sites.flatMap((site, place) => schemes.includes(site.scheme) ? [{type: "rect", x0: schemes.indexOf(site.scheme) - 0.47,
      x1: schemes.indexOf(site.scheme) + 0.47, y0: place - 0.45, y1: place + 0.45, line: {color: "#e6007e", width: 2}}] : []),
    xaxis: {side: "top", tickangle: -50, showgrid: false, dtick: 1},
    yaxis: {showgrid: false, tickvals: sites.map((_, place) => place), ticktext: sites.map(label), tickfont: {size: row > 12 ? 11 : 8}},
  })];
}

function channels(site) {
  return (colour) => [[{type: "bar", y: site.largest, x: site.largest.map((_, place) => Math.floor(place * site.channels / site.largest.length)),
    marker: {color: colour.front, line: {width: 0}}, hovertemplate: "channel %{x}: %{y:.3g}<extra></extra>"}],
  layout(colour, {showlegend: false, bargap: 0, xaxis: {title: {text: "channel", standoff: 4}, showgrid: false}, yaxis: {rangemode: "tozero", nticks: 4}})];
}

function positions(colour) {
  const steps = data.positions.steps.filter(({error}) => positive(error)), middle = ({error}) => number(error);
  const end = (step, side) => step.interval && Number.isFinite(number(step.interval[side])) ? number(step.interval[side]) : middle(step);
  return [[{mode: "lines+markers", x: steps.map((step) => step.end), y: steps.map(middle), line: {color: colour.front, width: 1.5}, marker: {color: colour.front, size: 8},
    text: steps.map((step) => `up to ${step.end}: ${short(step.error)} (${short(end(step, "low"))} to ${short(end(step, "high"))})`),
    hovertemplate: "%{text}<extra></extra>",
    error_y: {type: "data", symmetric: false, array: steps.map((step) => end(step, "high") - middle(step)),
      arrayminus: steps.map((step) => middle(step) - end(step, "low")), color: colour.front, thickness: 1.4, width: 4},
  }], layout(colour, {showlegend: false, hovermode: "closest",
    xaxis: {type: "log", title: {text: "up to position"}, tickvals: steps.map((step) => step.end)},
    yaxis: {...powers, dtick: undefined, title: {text: data.settings.unit}}})];
}

const drawings = {pareto, measured, weights: heat(true), values: heat(false)};
if (data.positions) drawings.positions = positions;
data.outliers.forEach((site, place) => { drawings[`outlier${place}`] = channels(site); });

function draw() {
  const colour = theme();
  for (const [name, drawing] of Object.entries(drawings)) {
    const place = document.getElementById(name);
    if (place.closest("details:not([open])")) continue;
    Plotly.react(place, ...drawing(colour), {responsive: true, displaylogo: false, displayModeBar: false});
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", draw);

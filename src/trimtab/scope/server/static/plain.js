// Everything that comes from a job or a file is put in as text, never as markup.
const state = document.getElementById("state");
const runs = document.getElementById("runs");

async function ask(path) {
  const response = await fetch(`/api/v1${path}`, { headers: { Accept: "application/json" } });
  const said = await response.json();
  if (!response.ok) throw new Error(said.error);
  return said;
}

function row(cells) {
  const line = document.createElement("tr");
  for (const text of cells) {
    const cell = document.createElement("td");
    cell.textContent = text;
    line.append(cell);
  }
  return line;
}

function steps(run) {
  return run.first_step === null ? "" : `${run.first_step} to ${run.last_step}`;
}

async function show() {
  try {
    const [status, found] = await Promise.all([ask("/status"), ask("/runs")]);
    const step = status.step >= 0 ? `, step ${status.step}` : "";
    state.textContent = `The job: ${status.state}${step}. ${status.error}`;
    runs.replaceChildren(
      ...found.runs.map((run) => row([run.name + (run.live ? " (live)" : ""), steps(run), run.error || run.warnings.join(" ")])),
    );
  } catch (error) {
    state.textContent = `${error.message}`;
  }
}

await show();
setInterval(show, 5000);

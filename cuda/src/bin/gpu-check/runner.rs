//! Runs the steps as processes with time limits, and writes the report.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::report::{self, Outcome, StepReport};
use crate::{Options, print, steps};

/// One step: its name in the report, the step of the child process, and its time limit.
struct Step {
    name: &'static str,
    step: &'static str,
    limit: Duration,
    under: Under,
}

/// How the process of a step is started.
#[derive(Clone, Copy, PartialEq)]
enum Under {
    Plain,
    /// With device code that the machine's `nvcc` compiled.
    MachineCode,
    /// Under a tool of `compute-sanitizer`.
    Sanitizer(&'static str),
}

const fn step(name: &'static str, step: &'static str, seconds: u64, under: Under) -> Step {
    Step { name, step, limit: Duration::from_secs(seconds), under }
}

/// All steps, the most important first.
const STEPS: &[Step] = &[
    step("kernels", "kernels", 30, Under::Plain),
    step("transfers", "transfers", 20, Under::Plain),
    step("backends", "backends", 40, Under::Plain),
    step("streams", "streams", 40, Under::Plain),
    step("partition", "partition", 15, Under::Plain),
    step("layers", "layers", 20, Under::Plain),
    step("rings", "rings", 30, Under::Plain),
    step("copies", "copies", 30, Under::Plain),
    step("index", "index", 20, Under::Plain),
    step("staged", "staged", 75, Under::Plain),
    step("slowdown", "slowdown", 40, Under::Plain),
    step("slack", "slack", 30, Under::Plain),
    step("memcheck", "kernels", 45, Under::Sanitizer("memcheck")),
    step("racecheck", "kernels", 45, Under::Sanitizer("racecheck")),
    step("memcheck of rings", "rings", 45, Under::Sanitizer("memcheck")),
    step("memcheck of layers", "layers", 30, Under::Sanitizer("memcheck")),
    step("racecheck of layers", "layers", 30, Under::Sanitizer("racecheck")),
    step("build", "kernels", 60, Under::MachineCode),
];

/// Returns the names of all steps.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    STEPS.iter().map(|step| step.name)
}

/// Runs all steps. Returns the exit code.
pub(crate) fn run(options: &Options) -> u8 {
    let began = Instant::now();
    let device = match steps::device() {
        Ok(device) => device,
        Err(error) => {
            print(&format!("gpu-check: no GPU was checked: {error}"));
            let report = StepReport {
                name: "device".to_owned(),
                outcome: Outcome::Failed(error.to_string()),
                seconds: 0.0,
                lines: Vec::new(),
            };
            write_report(options, &serde_json::json!({"device": "none"}), &[report]);
            return if error.is_unavailable() { 2 } else { 1 };
        }
    };
    print(&format!("gpu-check: {device}"));
    let chosen = |step: &&Step| options.only.is_empty() || options.only.iter().any(|name| name == step.name);
    let mut reports: Vec<StepReport> = Vec::new();
    for step in STEPS.iter().filter(chosen) {
        let left = options.limit.saturating_sub(began.elapsed());
        let report = run_step(step, options, left);
        print(&format!("{:<22} {} ({:.1} s)", report.name, report.outcome, report.seconds));
        for line in &report.lines {
            print(&format!("    {}", report::line_text(line)));
        }
        reports.push(report);
        // After every step, so that a machine that is lost in between leaves a report.
        write_report(options, &device, &reports);
    }
    let failed = reports.iter().filter(|report| matches!(report.outcome, Outcome::Failed(_))).count();
    print(&format!(
        "gpu-check: {failed} of {} steps failed, {:.0} s",
        reports.len(),
        began.elapsed().as_secs_f64()
    ));
    u8::from(failed > 0)
}

fn write_report(options: &Options, device: &Value, reports: &[StepReport]) {
    if let Err(error) = report::write(options, device, reports) {
        print(&format!("gpu-check: cannot write the report to {}: {error}", options.out.display()));
    }
}

fn run_step(step: &Step, options: &Options, left: Duration) -> StepReport {
    let began = Instant::now();
    let (outcome, lines) = match command(step, options) {
        _ if left < Duration::from_secs(2) => (Outcome::Failed("no time is left".to_owned()), Vec::new()),
        Ok(command) => run_process(command, step.limit.min(left), began),
        Err(outcome) => (outcome, Vec::new()),
    };
    StepReport { name: step.name.to_owned(), outcome, seconds: began.elapsed().as_secs_f64(), lines }
}

/// Returns the command of a step, or why it does not run.
fn command(step: &Step, options: &Options) -> Result<Command, Outcome> {
    let failed = |text: String| Outcome::Failed(text);
    let own =
        std::env::current_exe().map_err(|error| failed(format!("cannot find this program: {error}")))?;
    let mut device_code = options.device_code.clone();
    let mut command = match step.under {
        Under::Plain => Command::new(own),
        Under::MachineCode => {
            device_code = Some(compile(options)?);
            Command::new(own)
        }
        Under::Sanitizer(tool) => {
            let Some(sanitizer) = &options.sanitizer else {
                return Err(Outcome::Skipped(
                    "no compute-sanitizer: pass its path with --sanitizer".to_owned(),
                ));
            };
            let mut command = Command::new(sanitizer);
            command.args(["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]).arg(own);
            command
        }
    };
    command.args(["step", step.step, "--sms"]).arg(options.sms.to_string());
    if step.under != Under::Plain {
        command.arg("--small");
    }
    if let Some(file) = device_code {
        command.arg("--device-code").arg(file);
    }
    Ok(command)
}

/// Compiles the device code with the machine's `nvcc`, for its GPU.
fn compile(options: &Options) -> Result<PathBuf, Outcome> {
    let (Some(nvcc), Some(native)) = (&options.nvcc, &options.native) else {
        return Err(Outcome::Skipped("no nvcc or no sources: pass them with --nvcc and --native".to_owned()));
    };
    let target = options.out.join("device.cubin");
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-arch=native", "-cubin", "-Werror", "all-warnings", "-lineinfo"]);
    command.arg(native.join("device.cu")).arg("-o").arg(&target);
    let (outcome, _) = run_process(command, Duration::from_secs(60), Instant::now());
    match outcome {
        Outcome::Passed => std::path::absolute(&target).map_err(|error| Outcome::Failed(error.to_string())),
        other => Err(other),
    }
}

/// Runs a process until its end or the limit; returns its outcome and its JSON lines.
fn run_process(mut command: Command, limit: Duration, began: Instant) -> (Outcome, Vec<Value>) {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let program = Path::new(command.get_program()).display();
            return (Outcome::Failed(format!("cannot start {program}: {error}")), Vec::new());
        }
    };
    let output = child.stdout.take().map(collect);
    let errors = child.stderr.take().map(collect);
    let ended = wait(&mut child, limit, began);
    let text = |reader: Option<thread::JoinHandle<String>>| {
        reader.and_then(|reader| reader.join().ok()).unwrap_or_default()
    };
    let (output, errors) = (text(output), text(errors));
    let lines: Vec<Value> = output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let not_json = output.lines().filter(|line| serde_json::from_str::<Value>(line).is_err());
    let mut tail: Vec<&str> = not_json.chain(errors.lines()).filter(|line| !line.trim().is_empty()).collect();
    let outcome = match ended {
        Some(0) if lines.iter().any(|line| line["met"] == Value::Bool(false)) => {
            Outcome::Failed("a figure misses its goal".to_owned())
        }
        Some(0) => Outcome::Passed,
        Some(code) => {
            tail.drain(..tail.len().saturating_sub(30));
            Outcome::Failed(format!("exit code {code}: {}", tail.join("; ")))
        }
        None => {
            tail.drain(..tail.len().saturating_sub(10));
            Outcome::Failed(format!(
                "ended after {:.0} s, its limit: {}",
                limit.as_secs_f64(),
                tail.join("; ")
            ))
        }
    };
    (outcome, lines)
}

/// Waits for the process and returns its exit code; kills it at the limit and returns `None`.
fn wait(child: &mut Child, limit: Duration, began: Instant) -> Option<i32> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status.code().unwrap_or(-1)),
            Ok(None) if began.elapsed() < limit => thread::sleep(Duration::from_millis(20)),
            Ok(None) | Err(_) => {
                // The process may have ended in between.
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

/// Reads a stream of a child on an own thread, so that neither blocks.
fn collect(mut stream: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // Bytes that were read before an error are shown.
        let _ = stream.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

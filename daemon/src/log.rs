//! The log of a program: lines on standard error, in which a condition that repeats cannot flood.
//!
//! ```text
//!   warn!, error! ──► Limit (a layer) ── Log ──► line
//!                        └── Count ──► LogRate ──► reporting thread ──► a line with the count, every minute
//! ```
//!
//! Every warning and error passes [`Limit`], those of dependencies included: the first line of a condition is logged at once,
//! further ones are counted ([`reprise_policy::log_rate`]). Nothing needs to be done at the place that logs, except:
//!
//! * Name what the condition is of in a field of [`SUBJECT_FIELDS`]. Two peers are two conditions; two ports of one peer are
//!   not, so ports do not belong in these fields.
//! * Where the end can be seen, name the condition (`condition = "etcd_unreachable"`) and log its end with
//!   `recovered = "etcd_unreachable"` and the same subject. Such a line appears only when the condition was logged.
//!
//! An info line with `condition` is limited as well. Debug lines are not: a person who turns them on wants each.

use std::fmt::{self, Write};
use std::io;
use std::str::FromStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use reprise_policy::Tick;
use reprise_policy::log_rate::{LogDecision, LogRate, Occurrence, Report, ReportKind};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::Directive;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Fields that name what a condition is of. Their values are bounded by what is configured or connected, or the bound of
/// [`LogRate`] holds.
pub const SUBJECT_FIELDS: [&str; 18] = [
    // Of libraries that log through the crate `log`: all their events have one name.
    "log.target",
    "log.line",
    "peer",
    "device",
    "path",
    "listener",
    "member",
    "prefix",
    "tenant",
    "kind",
    "node",
    "name",
    "object",
    "namespace",
    "address",
    "profile",
    "allocation",
    "direction",
];

/// Names a condition, whatever place logs it.
const CONDITION: &str = "condition";

/// Names a condition that is over.
const RECOVERED: &str = "recovered";

/// Target of reports, which are not limited themselves.
const REPORT_TARGET: &str = "reprise_daemon::log";

/// With which a filter lets reports pass.
const REPORT_DIRECTIVE: &str = "reprise_daemon::log=info";

/// Bytes of an occurrence that a report repeats.
const TEXT_BYTES_MAX: usize = 300;

/// Form of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people; with colours where that is true.
    Text {
        /// Standard error is a terminal.
        colours: bool,
    },
    /// One object per line.
    Json,
}

/// How a program logs.
#[derive(Debug)]
pub struct Settings {
    /// Levels.
    pub filter: EnvFilter,
    /// Form of lines.
    pub format: Format,
    /// Lines about spans.
    pub spans: FmtSpan,
}

/// The running log. Dropped, it logs the counts that were not reported.
#[derive(Debug)]
pub struct Log {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

/// The layer that decides which warnings and errors become lines.
#[derive(Debug)]
struct Limit {
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    began: Instant,
    shared: Mutex<Shared>,
    /// Wakes the reporting thread.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Shared {
    rate: LogRate<Details>,
    /// Ends that were seen, with the words for them.
    ended: Vec<Report<Details>>,
    stopping: bool,
}

/// What a report repeats of an occurrence.
#[derive(Clone, Debug)]
struct Details {
    level: Level,
    text: String,
}

/// The fields of an event.
#[derive(Debug, Default)]
struct Fields {
    condition: Option<String>,
    recovered: Option<String>,
    subject: String,
    message: String,
    others: String,
}

/// Starts the log of this process.
///
/// # Errors
/// Another log was started, or the reporting thread cannot be.
pub fn start(settings: Settings) -> io::Result<Log> {
    let Settings { filter, format, spans } = settings;
    // Counts are written whatever a filter says of this crate: it has suppressed what they count.
    let filter = filter.add_directive(Directive::from_str(REPORT_DIRECTIVE).map_err(io::Error::other)?);
    let state = Arc::new(State::new());
    let registry = tracing_subscriber::registry().with(filter).with(Limit { state: Arc::clone(&state) });
    let lines = tracing_subscriber::fmt::layer().with_span_events(spans).with_writer(io::stderr);
    let started = match format {
        Format::Text { colours } => registry.with(lines.with_ansi(colours)).try_init(),
        Format::Json => registry.with(lines.json()).try_init(),
    };
    started.map_err(io::Error::other)?;
    let reporting = Arc::clone(&state);
    let thread =
        std::thread::Builder::new().name("log".to_owned()).spawn(move || reporting.report_until_stopped())?;
    Ok(Log { state, thread: Some(thread) })
}

impl Drop for Log {
    fn drop(&mut self) {
        self.state.shared().stopping = true;
        self.state.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It has ended, or it has panicked and that was logged.
            let _ = thread.join();
        }
    }
}

impl State {
    fn new() -> State {
        State { began: Instant::now(), shared: Mutex::default(), changed: Condvar::new() }
    }

    fn now(&self) -> Tick {
        Tick(0).after(self.began.elapsed())
    }

    /// Whether an event becomes a line now.
    fn decide(&self, level: Level, fields: &Fields, now: Tick) -> bool {
        let text = fields.text();
        let mut shared = self.shared();
        if let Some(recovered) = &fields.recovered {
            if let Some(mut report) = shared.rate.ended(recovered, &fields.subject, now) {
                report.details.text = text;
                shared.ended.push(report);
                self.changed.notify_one();
            }
            return false;
        }
        let Some(kind) = &fields.condition else { return true };
        let was_quiet = shared.rate.next_due().is_none();
        let occurrence = Occurrence { kind, subject: &fields.subject, details: Details { level, text } };
        let decision = shared.rate.occurred(occurrence, now);
        if was_quiet {
            // The reporting thread waits without a deadline.
            self.changed.notify_one();
        }
        decision == LogDecision::Log
    }

    /// Body of the reporting thread.
    fn report_until_stopped(&self) {
        let mut shared = self.shared();
        loop {
            let now = self.now();
            let mut reports = std::mem::take(&mut shared.ended);
            let stopping = shared.stopping;
            reports.extend(if stopping { shared.rate.flush(now) } else { shared.rate.due(now) });
            let next = shared.rate.next_due();
            let wrote = !reports.is_empty();
            if wrote {
                // Without the lock: lines pass the layer.
                drop(shared);
                reports.iter().for_each(write);
                shared = self.shared();
            }
            if stopping {
                return;
            }
            if wrote || !shared.ended.is_empty() || shared.stopping {
                // What was read before the lines were written is old: a condition may have begun meanwhile.
                continue;
            }
            shared = match next.map(|next| next.since(now)) {
                None => self.changed.wait(shared).unwrap_or_else(PoisonError::into_inner),
                Some(wait) => {
                    self.changed.wait_timeout(shared, wait).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Each change is whole, so a poisoned lock is as good as any.
    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes a report as a line.
fn write(report: &Report<Details>) {
    let Details { level, text } = &report.details;
    match report.what {
        ReportKind::Repeated { count, within } if *level == Level::ERROR => {
            tracing::error!(target: REPORT_TARGET, count, ?within, latest = %text, "repeated");
        }
        ReportKind::Repeated { count, within } if *level == Level::WARN => {
            tracing::warn!(target: REPORT_TARGET, count, ?within, latest = %text, "repeated");
        }
        ReportKind::Repeated { count, within } => {
            tracing::info!(target: REPORT_TARGET, count, ?within, latest = %text, "repeated");
        }
        ReportKind::Ended { total, lasted } => {
            tracing::info!(target: REPORT_TARGET, total, ?lasted, condition = %text, "no longer repeated");
        }
    }
}

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _context: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        let level = *metadata.level();
        let has = |name| metadata.fields().field(name).is_some();
        let is_limited = match level {
            Level::ERROR | Level::WARN => true,
            Level::INFO => has(CONDITION) || has(RECOVERED),
            _ => has(RECOVERED),
        };
        if !is_limited || metadata.target() == REPORT_TARGET {
            return true;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        // A place in the code is a kind of its own: the name has file and line.
        fields.condition.get_or_insert_with(|| metadata.name().to_owned());
        self.state.decide(level, &fields, self.state.now())
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let name = field.name();
        // Writing to a string does not fail.
        let _ = match name {
            CONDITION => write!(self.condition.get_or_insert_default(), "{value:?}"),
            RECOVERED => write!(self.recovered.get_or_insert_default(), "{value:?}"),
            "message" if self.message.is_empty() => write!(self.message, "{value:?}"),
            _ if SUBJECT_FIELDS.contains(&name) => write!(self.subject, " {name}={value:?}"),
            _ => write!(self.others, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        // Without quotes, as a line has it.
        self.record_debug(field, &format_args!("{value}"));
    }
}

impl Fields {
    /// The event as one line has it, cut to a bound.
    fn text(&self) -> String {
        let mut text = format!("{}{}{}", self.message, self.subject, self.others);
        if text.len() > TEXT_BYTES_MAX {
            let end = (0..=TEXT_BYTES_MAX).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
            text.truncate(end);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reprise_policy::log_rate::REPORT_INTERVAL;
    use tracing_subscriber::fmt::MakeWriter;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no test panics with it").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Lines {
        type Writer = Lines;

        fn make_writer(&'a self) -> Lines {
            self.clone()
        }
    }

    impl Lines {
        fn taken(&self) -> Vec<String> {
            let bytes = std::mem::take(&mut *self.0.lock().expect("no test panics with it"));
            String::from_utf8(bytes).expect("UTF-8").lines().map(str::to_owned).collect()
        }
    }

    /// Runs `body` with a log of its own; gives the state and the lines.
    fn logging(body: impl FnOnce(&State, &Lines)) {
        let (state, lines) = (Arc::new(State::new()), Lines::default());
        let format =
            tracing_subscriber::fmt::layer().without_time().with_ansi(false).with_writer(lines.clone());
        let limit = Limit { state: Arc::clone(&state) };
        let subscriber = tracing_subscriber::registry().with(limit).with(format);
        tracing::subscriber::with_default(subscriber, || body(&state, &lines));
    }

    /// What the reporting thread writes after a time.
    fn after(state: &State, time: Duration) {
        let now = state.now().after(time);
        let mut reports = std::mem::take(&mut state.shared().ended);
        reports.extend(state.shared().rate.due(now));
        reports.iter().for_each(write);
    }

    fn lose(peer: &str, port: u16) {
        tracing::warn!(peer, port, "peer connection lost");
    }

    fn fail(path: &str, page: u32) {
        tracing::error!(path, page, "device error");
    }

    #[test]
    fn a_warning_that_repeats_is_one_line_and_then_a_count() {
        logging(|state, lines| {
            (0..3000).for_each(|port| lose("10.0.0.1", port));
            assert_eq!(lines.taken().len(), 1);
            after(state, REPORT_INTERVAL);
            let [line] = <[String; 1]>::try_from(lines.taken()).expect("one line");
            for word in ["WARN", "count=2999", "peer connection lost", "peer=10.0.0.1", "port=2999"] {
                assert!(line.contains(word), "no {word} in {line}");
            }
            after(state, 3 * REPORT_INTERVAL);
            let [line] = <[String; 1]>::try_from(lines.taken()).expect("one line");
            assert!(line.contains("INFO") && line.contains("total=3000"), "{line}");
        });
    }

    #[test]
    fn unreachable_peers_and_failing_disks_are_logged_each_for_itself() {
        logging(|_, lines| {
            for round in 0..100 {
                lose("10.0.0.1", round);
                lose("10.0.0.2", round);
                fail("/dev/nvme0n1", u32::from(round));
                fail("/dev/nvme1n1", u32::from(round));
            }
            assert_eq!(lines.taken().len(), 4);
        });
    }

    #[test]
    fn an_end_that_was_seen_is_logged_once_and_only_after_the_condition() {
        logging(|state, lines| {
            let recover = |prefix: &str| {
                tracing::info!(recovered = "store_unreachable", prefix, "the store answers again");
                after(state, Duration::ZERO);
            };
            let lose = |error: &str| {
                tracing::warn!(condition = "store_unreachable", prefix = "nodes/", error, "no answer");
            };
            recover("nodes/");
            assert_eq!(lines.taken(), [""; 0], "nothing was wrong");
            lose("refused");
            lose("timed out");
            assert_eq!(lines.taken().len(), 1);
            recover("members/");
            assert_eq!(lines.taken(), [""; 0], "another subject");
            recover("nodes/");
            let [line] = <[String; 1]>::try_from(lines.taken()).expect("one line");
            assert!(line.contains("the store answers again") && line.contains("total=2"), "{line}");
            lose("refused");
            assert_eq!(lines.taken(), [""; 0], "it comes and goes");
            after(state, REPORT_INTERVAL);
            assert!(lines.taken()[0].contains("count=1"));
        });
    }

    #[test]
    fn information_is_not_limited_unless_it_names_a_condition() {
        logging(|_, lines| {
            for number in 0..5 {
                tracing::info!(number, "session opened");
            }
            assert_eq!(lines.taken().len(), 5);
            for number in 0..5 {
                tracing::info!(condition = "waiting_for_etcd", number, "etcd does not answer yet");
            }
            assert_eq!(lines.taken().len(), 1);
        });
    }
}

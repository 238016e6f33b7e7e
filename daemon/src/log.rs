//! Logging to standard error, with a rate limit for repeated conditions.
//!
//! ```text
//!   warn!, error! ──► RateLimitLayer ── Log ──► line
//!                        └── Count ──► LogRate ──► reporting thread ──► a line with the count, every minute
//! ```
//!
//! Every warning and error passes the [`RateLimitLayer`], including those of dependencies. The first event of
//! a condition is logged at once, and further ones are counted ([`reprise_policy::log_rate`]). Callers only
//! need to:
//!
//! * Put the subject of the condition into a field of [`SUBJECT_FIELDS`]. Two peers are two conditions. Two
//!   ports of one peer are not, so ports do not belong in these fields.
//! * Name the condition (`condition = "etcd_unreachable"`) if its end can be detected, and log the end with
//!   `recovered = "etcd_unreachable"` and the same subject. Such an event is logged only if the condition
//!   was.
//!
//! Info events with `condition` are limited as well. Debug events are not: enabling them requests all of
//! them.

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

/// Fields that identify the subject of a condition. Configuration or connections limit the number of their
/// values; otherwise the limit of [`LogRate`] applies.
pub const SUBJECT_FIELDS: [&str; 19] = [
    // Fields of libraries that use the crate `log`, whose events all have the same name.
    "log.target",
    "log.line",
    "peer",
    // Identity of a client, or its address if it has shown none.
    "client",
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

/// Field that names a condition, independent of the place in the code.
const CONDITION: &str = "condition";

/// Field that names a condition that has ended.
const RECOVERED: &str = "recovered";

/// Target of reports, which are exempt from the limit.
const REPORT_TARGET: &str = "reprise_daemon::log";

/// Filter directive that lets reports pass.
const REPORT_DIRECTIVE: &str = "reprise_daemon::log=info";

/// Maximum bytes of an event that a report repeats.
const TEXT_BYTES_MAX: usize = 300;

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Readable text, optionally with colours.
    Text {
        /// Whether to use colours; set if standard error is a terminal.
        colours: bool,
    },
    /// One JSON object per line.
    Json,
}

/// Settings of the log.
#[derive(Debug)]
pub struct Settings {
    /// Filter of targets and levels.
    pub filter: EnvFilter,
    /// Format of log lines.
    pub format: Format,
    /// Span events to log.
    pub spans: FmtSpan,
}

/// The running log. Dropping it logs the pending counts.
#[derive(Debug)]
pub struct Log {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

/// The layer that limits repeated warnings and errors.
#[derive(Debug)]
struct RateLimitLayer {
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    start: Instant,
    shared: Mutex<Shared>,
    /// Wakes the reporting thread.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Shared {
    rate: LogRate<Details>,
    /// Ended conditions, with the text to log.
    ended: Vec<Report<Details>>,
    stopping: bool,
}

/// The event that a report repeats.
#[derive(Clone, Debug)]
struct Details {
    level: Level,
    text: String,
}

/// Fields of an event.
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
/// A log is already running, or the reporting thread cannot be started.
pub fn start(settings: Settings) -> io::Result<Log> {
    let Settings { filter, format, spans } = settings;
    // Reports must pass any filter, because they replace suppressed lines.
    let filter = filter.add_directive(Directive::from_str(REPORT_DIRECTIVE).map_err(io::Error::other)?);
    let state = Arc::new(State::new());
    let registry =
        tracing_subscriber::registry().with(filter).with(RateLimitLayer { state: Arc::clone(&state) });
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
            // A panic of the thread was already logged.
            let _ = thread.join();
        }
    }
}

impl State {
    fn new() -> State {
        State { start: Instant::now(), shared: Mutex::default(), changed: Condvar::new() }
    }

    fn now(&self) -> Tick {
        Tick(0).after(self.start.elapsed())
    }

    /// Decides whether an event is logged now.
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
            // The reporting thread is waiting without a deadline.
            self.changed.notify_one();
        }
        decision == LogDecision::Log
    }

    /// Main function of the reporting thread.
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
                // Unlock first: the written lines pass through the layer, which locks.
                drop(shared);
                reports.iter().for_each(write);
                shared = self.shared();
            }
            if stopping {
                return;
            }
            if wrote || !shared.ended.is_empty() || shared.stopping {
                // The state may have changed while the lines were written.
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

    /// Locks the shared state. A poisoned lock is usable, because a panic cannot leave a change half applied.
    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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

impl<S: Subscriber> Layer<S> for RateLimitLayer {
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
        // Without a condition, the place in the code is the kind; the name contains file and line.
        fields.condition.get_or_insert_with(|| metadata.name().to_owned());
        self.state.decide(level, &fields, self.state.now())
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let name = field.name();
        // Writing to a string cannot fail.
        let _ = match name {
            CONDITION => write!(self.condition.get_or_insert_default(), "{value:?}"),
            RECOVERED => write!(self.recovered.get_or_insert_default(), "{value:?}"),
            "message" if self.message.is_empty() => write!(self.message, "{value:?}"),
            _ if SUBJECT_FIELDS.contains(&name) => write!(self.subject, " {name}={value:?}"),
            _ => write!(self.others, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        // Omit quotes, as in a log line.
        self.record_debug(field, &format_args!("{value}"));
    }
}

impl Fields {
    /// The event as in a log line, truncated to [`TEXT_BYTES_MAX`].
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
            self.0.lock().expect("not poisoned").extend_from_slice(bytes);
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
            let bytes = std::mem::take(&mut *self.0.lock().expect("not poisoned"));
            String::from_utf8(bytes).expect("UTF-8").lines().map(str::to_owned).collect()
        }
    }

    /// Runs `body` with its own log; passes the state and the lines.
    fn logging(body: impl FnOnce(&State, &Lines)) {
        let (state, lines) = (Arc::new(State::new()), Lines::default());
        let format =
            tracing_subscriber::fmt::layer().without_time().with_ansi(false).with_writer(lines.clone());
        let limit = RateLimitLayer { state: Arc::clone(&state) };
        let subscriber = tracing_subscriber::registry().with(limit).with(format);
        tracing::subscriber::with_default(subscriber, || body(&state, &lines));
    }

    /// Writes the reports that are due after `time`, like the reporting thread.
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
    fn logs_a_repeated_warning_once_and_then_its_count() {
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
    fn logs_each_peer_and_device_as_a_separate_condition() {
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
    fn logs_the_end_of_a_condition_once_and_only_if_it_was_logged() {
        logging(|state, lines| {
            let recover = |prefix: &str| {
                tracing::info!(recovered = "store_unreachable", prefix, "the store is reachable again");
                after(state, Duration::ZERO);
            };
            let lose = |error: &str| {
                tracing::warn!(condition = "store_unreachable", prefix = "nodes/", error, "no answer");
            };
            recover("nodes/");
            assert_eq!(lines.taken(), [""; 0], "no condition was active");
            lose("refused");
            lose("timed out");
            assert_eq!(lines.taken().len(), 1);
            recover("members/");
            assert_eq!(lines.taken(), [""; 0], "another subject");
            recover("nodes/");
            let [line] = <[String; 1]>::try_from(lines.taken()).expect("one line");
            assert!(line.contains("the store is reachable again") && line.contains("total=2"), "{line}");
            lose("refused");
            assert_eq!(lines.taken(), [""; 0], "the condition recurs");
            after(state, REPORT_INTERVAL);
            assert!(lines.taken()[0].contains("count=1"));
        });
    }

    #[test]
    fn limits_info_events_only_if_they_name_a_condition() {
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

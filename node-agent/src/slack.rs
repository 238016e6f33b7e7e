//! Active slack profiles of the node: I/O budgets next to the compute of GPUs, and the errors of their predictions.
//!
//! The reconciler thread adds validated profiles, and an agent outside of a cluster those of its configuration
//! ([`profile_file`]). The admin port reads them. Sessions report the computation that
//! their engine begins ([`LayerReport`]), and get the prediction and budget of the model's profile. With the next
//! report comes the measured time of a layer: its difference from the prediction is counted for the profile, and the
//! CacheNode reports quantiles of these errors. The core gets the slack for writes, to which it defers the agent's own
//! device writes ([`SlackReports`]).
//!
//! Invariants: an error is counted for the revision that made the prediction. Another revision starts without
//! errors. A reported error changes only by an eighth, or across the profile's limit, because each change causes a
//! status write.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_agent_core::limits::SLACK_REPORT_MIN;
use reprise_policy::SessionId;
use reprise_policy::session::{LayerGuidance, LayerReport};
use reprise_policy::slack::prediction::{PredictionError, PredictionErrors};
use reprise_policy::slack::{Budget, Direction, Profile, WriteSlack};

use crate::config::digest;
use crate::error::{AgentError, ErrorKind};

pub(crate) mod profile_file;

/// A reported error stays while the measured one differs from it by less than this share.
const REPORT_TOLERANCE_DIVISOR: u32 = 8;

/// Interval at which the core is reminded of an unchanged slack: well within the time for which a report counts.
const REMIND_EVERY: Duration = Duration::from_millis(250);

const _: () = assert!(2 * REMIND_EVERY.as_millis() <= SLACK_REPORT_MIN.as_millis());

/// All active profiles by name; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActiveProfiles {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    profiles: BTreeMap<String, Entry>,
    /// Last prediction for each session whose model has a profile.
    predictions: BTreeMap<SessionId, Prediction>,
}

#[derive(Debug)]
struct Entry {
    active: Arc<ActiveProfile>,
    errors: PredictionErrors,
    reported: Option<PredictionError>,
}

/// Prediction of a profile's revision.
#[derive(Debug)]
struct Prediction {
    profile: String,
    digest: String,
    layer_micros: u32,
}

/// An active slack profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ActiveProfile {
    /// Digest of its revision.
    pub(crate) digest: String,
    pub(crate) profile: Profile,
}

/// Answer to the report of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reported {
    /// For the engine.
    pub(crate) guidance: LayerGuidance,
    /// For the core; `None` if the model has no profile.
    pub(crate) slack: Option<WriteSlack>,
}

/// Slack for writes that one session has reported to the core. Engines report each layer or step, and the core needs
/// only changes and reminders.
#[derive(Debug, Default)]
pub(crate) struct SlackReports {
    last: Option<(Option<WriteSlack>, Instant)>,
}

impl SlackReports {
    /// Whether the core needs this slack, which then counts as reported.
    pub(crate) fn is_news(&mut self, slack: Option<WriteSlack>, now: Instant) -> bool {
        let is_known = match self.last {
            None => slack.is_none(),
            Some((last, _)) if slack.is_none() => last.is_none(),
            Some((last, at)) => last == slack && now.saturating_duration_since(at) < REMIND_EVERY,
        };
        if !is_known {
            self.last = Some((slack, now));
        }
        !is_known
    }
}

impl ActiveProfiles {
    /// Reads the profiles of the configuration; each has the name of its file.
    ///
    /// # Errors
    /// `ErrorKind::Config`: a file cannot be read or is not a valid profile, or two files have the same name.
    pub(crate) fn from_files(paths: &[PathBuf]) -> Result<ActiveProfiles, AgentError> {
        let profiles = ActiveProfiles::default();
        for path in paths {
            let refuse = |why: String| {
                let what = format!("invalid slack.profiles: '{}': {why}", path.display());
                AgentError::new(ErrorKind::Config, what)
            };
            let text = profile_file::read(path).map_err(|error| refuse(format!("cannot read: {error}")))?;
            let profile = profile_file::parse(&text).map_err(refuse)?;
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if profiles.get(&name).is_some() {
                return Err(refuse(format!("another profile has the name '{name}': rename the file")));
            }
            tracing::info!(profile = name, "activated a slack profile");
            profiles.put(&name, ActiveProfile { digest: digest(&text), profile });
        }
        Ok(profiles)
    }

    /// Returns a profile by name.
    pub(crate) fn get(&self, name: &str) -> Option<Arc<ActiveProfile>> {
        self.state().profiles.get(name).map(|entry| entry.active.clone())
    }

    /// Adds a profile, or replaces its previous revision.
    pub(crate) fn put(&self, name: &str, effective: ActiveProfile) {
        let entry =
            Entry { active: Arc::new(effective), errors: PredictionErrors::default(), reported: None };
        self.state().profiles.insert(name.to_owned(), entry);
    }

    /// Removes all other profiles.
    pub(crate) fn keep_only(&self, is_kept: impl Fn(&str) -> bool) {
        self.state().profiles.retain(|name, _| is_kept(name));
    }

    /// Counts the error of the session's last prediction, and returns the next one. Of several profiles of the
    /// model, the preferred one applies, otherwise the first by name.
    pub(crate) fn report(
        &self,
        session: SessionId,
        report: &LayerReport,
        preferred: Option<&str>,
    ) -> Reported {
        let mut state = self.state();
        if let (Some(predicted), Some(measured)) =
            (state.predictions.remove(&session), report.previous_layer_micros)
            && let Some(entry) = state.profiles.get_mut(&predicted.profile)
            && entry.active.digest == predicted.digest
        {
            entry.errors.record(predicted.layer_micros, measured);
        }
        let of_model =
            |(_, entry): &(&String, &Entry)| entry.active.profile.content().subject.model == report.model;
        let preferred = preferred.and_then(|name| state.profiles.get_key_value(name)).filter(of_model);
        let chosen = preferred.or_else(|| state.profiles.iter().find(of_model));
        let Some((name, entry)) = chosen else { return Reported::default() };
        let slack = Some(entry.active.profile.write_slack(report.computation));
        let Some(computation) = report.computation else { return Reported { slack, ..Reported::default() } };
        let (profile, digest) = (&entry.active.profile, entry.active.digest.clone());
        let budget = profile.budget(computation);
        let (slack_micros, io_sms) = match budget {
            Budget::Window { micros, io_sms } => (micros, io_sms),
            Budget::Outside(_) => (0, 0),
        };
        let layer_micros = profile.window(computation).map(|window| window.layer_micros);
        let guidance = LayerGuidance {
            layer_micros: layer_micros.unwrap_or_default(),
            slack_micros,
            io_sms,
            read_iocbs: profile.fitting(Direction::Read, budget),
            write_iocbs: profile.fitting(Direction::Write, budget),
        };
        let profile = name.clone();
        if let Some(layer_micros) = layer_micros {
            state.predictions.insert(session, Prediction { profile, digest, layer_micros });
        }
        Reported { guidance, slack }
    }

    /// Forgets the last prediction for a session.
    pub(crate) fn session_closed(&self, session: SessionId) {
        self.state().predictions.remove(&session);
    }

    /// Returns the error to report for a profile; `None` before enough layers were measured.
    pub(crate) fn prediction_error(&self, name: &str) -> Option<PredictionError> {
        let mut state = self.state();
        let entry = state.profiles.get_mut(name)?;
        let measured = PredictionError {
            p50_percent: entry.errors.quantile(50)?,
            p99_percent: entry.errors.quantile(99)?,
        };
        let limit = u32::from(entry.active.profile.content().max_error_percent);
        let near = |before: u32, now: u32| before.abs_diff(now) <= before / REPORT_TOLERANCE_DIVISOR;
        let stays = entry.reported.is_some_and(|before| {
            near(before.p50_percent, measured.p50_percent)
                && near(before.p99_percent, measured.p99_percent)
                && (before.p99_percent > limit) == (measured.p99_percent > limit)
        });
        if !stays {
            entry.reported = Some(measured);
        }
        entry.reported
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::slack::content::TOKENS_MAX;
    use reprise_policy::slack::prediction::SAMPLES_MIN;
    use reprise_policy::slack::{
        Computation, Content, Fallback, KernelTime, LayerSlack, Measurement, Phase, Subject, Window,
    };

    use super::*;

    fn active(digest: &str, layer_micros: u32) -> ActiveProfile {
        let window = Window {
            phase: Phase::Decode,
            min_input_tokens: 0,
            max_input_tokens: 8,
            min_prefix_tokens: 0,
            max_prefix_tokens: TOKENS_MAX,
            layer_micros,
            slack_micros: 50,
            free_sms: 4,
        };
        let kernels =
            vec![KernelTime { iocbs: 1, micros: 20, sms: 2 }, KernelTime { iocbs: 2, micros: 60, sms: 2 }];
        let subject = Subject {
            model: "llama".to_owned(),
            gpu_product: "g".to_owned(),
            tensor_parallel: 1,
            engine_version: "e".to_owned(),
        };
        let measurement = Measurement {
            step_tokens: 1,
            iocb_bytes: 1,
            windows: vec![window],
            reads: kernels.clone(),
            writes: kernels,
        };
        let fallback = Fallback::ThrottleWrites;
        let content = Content { subject, usable_percent: 100, fallback, max_error_percent: 30, measurement };
        ActiveProfile { digest: digest.to_owned(), profile: Profile::new(content).expect("a profile") }
    }

    fn decode(previous: u32) -> LayerReport {
        LayerReport {
            model: "llama".to_owned(),
            computation: Some(Computation { phase: Phase::Decode, input_tokens: 7, prefix_tokens: 900 }),
            previous_layer_micros: (previous > 0).then_some(previous),
        }
    }

    const SESSION: SessionId = SessionId(1);

    #[test]
    fn report_returns_the_budget_of_the_models_profile() {
        let profiles = ActiveProfiles::default();
        assert_eq!(profiles.report(SESSION, &decode(0), None), Reported::default());
        profiles.put("p", active("d", 100));
        let expected =
            LayerGuidance { layer_micros: 100, slack_micros: 50, io_sms: 4, read_iocbs: 1, write_iocbs: 1 };
        let reported = profiles.report(SESSION, &decode(0), None);
        assert_eq!(reported.guidance, expected);
        let slack = LayerSlack { phase: Phase::Decode, cycle_micros: 1000, bytes: 10, bytes_max: 10 };
        assert_eq!(reported.slack, Some(WriteSlack::Layers(slack)), "ten layers with an IOCB of one byte");
        let other = LayerReport { model: "other".to_owned(), ..decode(0) };
        assert_eq!(profiles.report(SESSION, &other, None), Reported::default());
        let idle = LayerReport { computation: None, ..decode(0) };
        let idle = profiles.report(SESSION, &idle, None);
        assert_eq!(idle, Reported { slack: Some(WriteSlack::Idle), ..Reported::default() });
    }

    #[test]
    fn preferred_profile_applies_if_it_is_of_the_reported_model() {
        let profiles = ActiveProfiles::default();
        profiles.put("a", active("d", 100));
        profiles.put("b", active("e", 200));
        let layer_micros =
            |preferred: Option<&str>| profiles.report(SESSION, &decode(0), preferred).guidance.layer_micros;
        assert_eq!(layer_micros(None), 100);
        assert_eq!(layer_micros(Some("b")), 200);
        assert_eq!(layer_micros(Some("missing")), 100);
        let other = LayerReport { model: "other".to_owned(), ..decode(0) };
        assert_eq!(profiles.report(SESSION, &other, Some("b")), Reported::default());
        // The error of a prediction is counted for the profile that made it. The first report has none before it.
        for _ in 0..=SAMPLES_MIN {
            profiles.report(SESSION, &decode(220), Some("b"));
        }
        assert_eq!(profiles.prediction_error("a"), None);
        assert_eq!(profiles.prediction_error("b").map(|error| error.p50_percent), Some(10));
    }

    #[test]
    fn profiles_of_the_configuration_have_the_names_of_their_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = serde_json::to_string(active("d", 100).profile.content()).expect("JSON");
        let (valid, invalid) = (folder.path().join("llama.json"), folder.path().join("other.json"));
        std::fs::write(&valid, &text).expect("written");
        std::fs::write(&invalid, "{}").expect("written");
        let profiles = ActiveProfiles::from_files(std::slice::from_ref(&valid)).expect("valid");
        assert_eq!(profiles.get("llama").map(|active| active.digest.clone()), Some(digest(text.as_bytes())));
        let refused =
            |paths: &[PathBuf]| ActiveProfiles::from_files(paths).map(drop).expect_err("refused").chain();
        assert!(refused(&[invalid]).contains("other.json"));
        assert!(refused(&[folder.path().join("none.json")]).contains("cannot read"));
        assert!(refused(&[valid.clone(), valid]).contains("another profile has the name 'llama'"));
    }

    #[test]
    fn core_gets_changed_slack_at_once_and_unchanged_slack_as_a_reminder() {
        let (idle, free) = (Some(WriteSlack::Idle), Some(WriteSlack::Unrestricted));
        let mut reports = SlackReports::default();
        let start = Instant::now();
        let after = |millis| start + Duration::from_millis(millis);
        assert!(!reports.is_news(None, start), "a session without a profile reports nothing");
        assert!(reports.is_news(idle, start));
        assert!(!reports.is_news(idle, after(249)));
        assert!(reports.is_news(idle, after(250)));
        assert!(reports.is_news(free, after(251)));
        assert!(reports.is_news(None, after(252)), "the profile was removed");
        assert!(!reports.is_news(None, after(900)));
    }

    #[test]
    fn errors_are_those_of_the_revision_that_predicted() {
        let profiles = ActiveProfiles::default();
        profiles.put("p", active("d", 100));
        profiles.report(SESSION, &decode(900), None);
        for _ in 0..100 {
            profiles.report(SESSION, &decode(110), None);
        }
        let error = |p50_percent, p99_percent| Some(PredictionError { p50_percent, p99_percent });
        assert_eq!(profiles.prediction_error("p"), error(10, 10), "900 µs belong to no prediction");
        for _ in 0..100 {
            profiles.report(SESSION, &decode(140), None);
        }
        assert_eq!(profiles.prediction_error("p"), error(10, 40));
        for _ in 0..150 {
            profiles.report(SESSION, &decode(142), None);
        }
        assert_eq!(
            profiles.prediction_error("p").map(|error| error.p99_percent),
            Some(42),
            "the median moved"
        );
        profiles.put("p", active("later", 142));
        profiles.report(SESSION, &decode(500), None);
        assert_eq!(profiles.prediction_error("p"), None, "another revision starts without errors");
        profiles.session_closed(SESSION);
        profiles.report(SESSION, &decode(500), None);
        let state = profiles.state();
        assert_eq!(state.profiles["p"].errors.samples(), 0, "a closed session has no prediction");
    }
}

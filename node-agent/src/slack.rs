//! Active slack profiles of the node: I/O budgets next to the compute of GPUs, and the errors of their predictions.
//!
//! The reconciler thread adds validated profiles; the admin port reads them. Sessions report the computation that
//! their engine begins ([`LayerReport`]), and get the prediction and budget of the model's profile. With the next
//! report comes the measured time of a layer: its difference from the prediction is counted for the profile, and the
//! CacheNode reports quantiles of these errors. The agent's own device I/O runs as without a profile.
//!
//! Invariants: an error is counted for the revision that made the prediction. Another revision starts without
//! errors. A reported error changes only by an eighth, or across the profile's limit, because each change causes a
//! status write.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use reprise_policy::SessionId;
use reprise_policy::session::{LayerGuidance, LayerReport};
use reprise_policy::slack::prediction::{PredictionError, PredictionErrors};
use reprise_policy::slack::{Budget, Direction, Profile};

/// A reported error stays while the measured one differs from it by less than this share.
const REPORT_TOLERANCE_DIVISOR: u32 = 8;

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

impl ActiveProfiles {
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

    /// Counts the error of the session's last prediction, and returns the next one. Of several profiles of a
    /// model, the first by name applies.
    pub(crate) fn report(&self, session: SessionId, report: &LayerReport) -> LayerGuidance {
        let mut state = self.state();
        if let (Some(predicted), Some(measured)) =
            (state.predictions.remove(&session), report.previous_layer_micros)
            && let Some(entry) = state.profiles.get_mut(&predicted.profile)
            && entry.active.digest == predicted.digest
        {
            entry.errors.record(predicted.layer_micros, measured);
        }
        let Some(computation) = report.computation else { return LayerGuidance::default() };
        let of_model =
            |(_, entry): &(&String, &Entry)| entry.active.profile.content().subject.model == report.model;
        let Some((name, entry)) = state.profiles.iter().find(of_model) else {
            return LayerGuidance::default();
        };
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
        guidance
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
    use reprise_policy::slack::{
        Computation, Content, Fallback, KernelTime, Measurement, Phase, Subject, Window,
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
        assert_eq!(profiles.report(SESSION, &decode(0)), LayerGuidance::default());
        profiles.put("p", active("d", 100));
        let expected =
            LayerGuidance { layer_micros: 100, slack_micros: 50, io_sms: 4, read_iocbs: 1, write_iocbs: 1 };
        assert_eq!(profiles.report(SESSION, &decode(0)), expected);
        let other = LayerReport { model: "other".to_owned(), ..decode(0) };
        assert_eq!(profiles.report(SESSION, &other), LayerGuidance::default());
        let idle = LayerReport { computation: None, ..decode(0) };
        assert_eq!(profiles.report(SESSION, &idle), LayerGuidance::default());
    }

    #[test]
    fn errors_are_those_of_the_revision_that_predicted() {
        let profiles = ActiveProfiles::default();
        profiles.put("p", active("d", 100));
        profiles.report(SESSION, &decode(900));
        for _ in 0..100 {
            profiles.report(SESSION, &decode(110));
        }
        let error = |p50_percent, p99_percent| Some(PredictionError { p50_percent, p99_percent });
        assert_eq!(profiles.prediction_error("p"), error(10, 10), "900 µs belong to no prediction");
        for _ in 0..100 {
            profiles.report(SESSION, &decode(140));
        }
        assert_eq!(profiles.prediction_error("p"), error(10, 40));
        for _ in 0..150 {
            profiles.report(SESSION, &decode(142));
        }
        assert_eq!(
            profiles.prediction_error("p").map(|error| error.p99_percent),
            Some(42),
            "the median moved"
        );
        profiles.put("p", active("later", 142));
        profiles.report(SESSION, &decode(500));
        assert_eq!(profiles.prediction_error("p"), None, "another revision starts without errors");
        profiles.session_closed(SESSION);
        profiles.report(SESSION, &decode(500));
        let state = profiles.state();
        assert_eq!(state.profiles["p"].errors.samples(), 0, "a closed session has no prediction");
    }
}

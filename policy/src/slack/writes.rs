//! Slack for writes that an agent issues: the bytes that the layers of an engine's computation admit.
//!
//! A GPU launches IOCBs layer by layer ([`super::scheduler`]). An agent writes blocks from its memory, without
//! multiprocessors, but the writes share the devices with the reads that layers wait for. The tables of write
//! kernels state how much a window carries, so the agent uses the same tables, in bytes.
//!
//! Out of scope: when an agent releases its writes within these limits, and how long it defers them.

use super::{Budget, Computation, Direction, Fallback, Phase, Profile, Window};

/// Minimum microseconds from one window to the next. Every batch of writes costs a device a sync, so the windows of
/// shorter layers are used together.
const CYCLE_MICROS_MIN: u32 = 1_000;

/// Slack for writes while an engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteSlack {
    /// The engine computes nothing, so writes delay nothing.
    Idle,
    /// No window applies, and the profile's fallback lets writes continue.
    Unrestricted,
    /// Writes are limited to the windows of layers.
    Layers(LayerSlack),
}

/// Windows for writes in the layers of a computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSlack {
    /// Phase of the computation.
    pub phase: Phase,
    /// Microseconds from one window to the next: one layer, or several short ones. 0 if they were not measured,
    /// in which case `bytes` is 0.
    pub cycle_micros: u32,
    /// Bytes of writes that fit one window; 0: writes wait.
    pub bytes: u64,
    /// Bytes of writes that fit the largest window of the profile; 0: no window fits any write.
    pub bytes_max: u64,
}

impl Profile {
    /// Slack for writes during a computation; `None` stands for an engine that computes nothing.
    pub fn write_slack(&self, of: Option<Computation>) -> WriteSlack {
        let Some(of) = of else { return WriteSlack::Idle };
        if self.budget(of) == Budget::Outside(Fallback::Ignore) {
            return WriteSlack::Unrestricted;
        }
        let (cycle_micros, bytes) = self.window(of).map_or((0, 0), |window| self.cycle(window));
        WriteSlack::Layers(LayerSlack {
            phase: of.phase,
            cycle_micros,
            bytes,
            bytes_max: self.write_bytes_max,
        })
    }

    /// Bytes of writes that fit the largest window.
    pub(super) fn largest_write(&self) -> u64 {
        let windows = self.content().measurement.windows.iter();
        windows.map(|window| self.cycle(window).1).max().unwrap_or(0)
    }

    /// Microseconds of as many layers as take [`CYCLE_MICROS_MIN`], and the bytes of writes that fit them.
    fn cycle(&self, window: &Window) -> (u32, u64) {
        let layers = CYCLE_MICROS_MIN.div_ceil(window.layer_micros);
        let iocbs = u64::from(self.fitting(Direction::Write, self.budget_of(window)));
        let bytes = iocbs * u64::from(self.content().measurement.iocb_bytes);
        (window.layer_micros * layers, bytes * u64::from(layers))
    }
}

#[cfg(test)]
mod tests {
    use super::super::content::TOKENS_MAX;
    use super::super::{Content, KernelTime, Measurement, Subject};
    use super::*;

    fn window(phase: Phase, slack_micros: u32) -> Window {
        Window {
            phase,
            min_input_tokens: 0,
            max_input_tokens: 1024,
            min_prefix_tokens: 0,
            max_prefix_tokens: TOKENS_MAX,
            layer_micros: 900,
            slack_micros,
            free_sms: 4,
        }
    }

    /// Writes of 1 and 4 IOCBs of 1,000 bytes take 100 and 300 µs.
    fn profile(fallback: Fallback, windows: Vec<Window>) -> Profile {
        let subject = Subject {
            model: "llama".to_owned(),
            gpu_product: "g".to_owned(),
            tensor_parallel: 1,
            engine_version: "e".to_owned(),
        };
        let writes =
            vec![KernelTime { iocbs: 1, micros: 100, sms: 2 }, KernelTime { iocbs: 4, micros: 300, sms: 2 }];
        let measurement =
            Measurement { step_tokens: 32, iocb_bytes: 1000, windows, reads: writes.clone(), writes };
        let content = Content { subject, usable_percent: 50, fallback, max_error_percent: 30, measurement };
        Profile::new(content).expect("a valid profile")
    }

    fn layers(phase: Phase, input_tokens: u32, of: &Profile) -> WriteSlack {
        of.write_slack(Some(Computation { phase, input_tokens, prefix_tokens: 0 }))
    }

    #[test]
    fn window_admits_the_largest_write_launch_that_fits_its_usable_share() {
        let profile =
            profile(Fallback::ThrottleWrites, vec![window(Phase::Prefill, 200), window(Phase::Decode, 600)]);
        let expected = |phase, bytes| {
            WriteSlack::Layers(LayerSlack { phase, cycle_micros: 1800, bytes, bytes_max: 8000 })
        };
        assert_eq!(
            layers(Phase::Prefill, 512, &profile),
            expected(Phase::Prefill, 2000),
            "half of 200 µs, twice"
        );
        assert_eq!(layers(Phase::Decode, 1, &profile), expected(Phase::Decode, 8000));
        assert_eq!(profile.write_slack(None), WriteSlack::Idle);
    }

    #[test]
    fn fallback_decides_about_writes_outside_of_windows() {
        let windows = || vec![window(Phase::Decode, 200)];
        let waits = WriteSlack::Layers(LayerSlack {
            phase: Phase::Prefill,
            cycle_micros: 0,
            bytes: 0,
            bytes_max: 2000,
        });
        for fallback in [Fallback::ThrottleWrites, Fallback::PauseIo] {
            assert_eq!(layers(Phase::Prefill, 512, &profile(fallback, windows())), waits, "{fallback:?}");
        }
        let unrestricted = profile(Fallback::Ignore, windows());
        assert_eq!(layers(Phase::Prefill, 512, &unrestricted), WriteSlack::Unrestricted);
    }

    #[test]
    fn profile_without_a_window_for_any_write_reports_it() {
        let profile = profile(Fallback::PauseIo, vec![window(Phase::Prefill, 100)]);
        let WriteSlack::Layers(slack) = layers(Phase::Prefill, 512, &profile) else { panic!("restricted") };
        assert_eq!((slack.cycle_micros, slack.bytes, slack.bytes_max), (1800, 0, 0));
    }
}

//! Cached prefixes that the first step of a request loads: before its computation, or layer by layer with it.
//!
//! ```text
//! blocking:    |---- load ----|-- compute --|      layer-wise:  |---- load ----|
//!                                                               |-- compute --|
//! ```
//!
//! A layer-wise step ends with the slower of both. The first layer of the load and the last one of the computation are
//! not added, so the time is too short by at most one layer of each.

use super::engine::{Engine, PrefixLoading, Purpose};
use super::fabric::ChannelKind;
use super::lookahead::channel_of;

impl Engine {
    /// Begins the loads that the step waits for, of the requests whose prompts fit into its token budget.
    pub(super) fn load_blocking_prefixes(&mut self) {
        if self.prefix_loading != PrefixLoading::Blocking {
            return;
        }
        let left = |engine: &Engine, number: u32| engine.requests[number as usize].prefill_left();
        let decodes = self.batch.iter().filter(|number| left(self, **number) == 0).count() as u32;
        let mut budget = self.setup.step_tokens_max.saturating_sub(decodes);
        for number in self.batch.clone() {
            let tokens = left(self, number).min(budget);
            if let Some(legs) = self.take_prefix(number).filter(|_| tokens > 0) {
                self.pending += 1;
                self.fabric.start(&mut self.events, self.now, &legs, Purpose::BlockingPrefix);
            }
            budget -= tokens;
            if budget == 0 {
                return;
            }
        }
    }

    /// Ends a load that the step waited for.
    pub(super) fn blocking_prefix_arrived(&mut self) {
        self.pending -= 1;
        self.compute_when_ready();
    }

    /// Adds the loads of the requests of a step to its work.
    pub(super) fn add_layer_wise_prefixes(&mut self, legs: &mut Vec<(ChannelKind, u64)>) {
        if self.prefix_loading != PrefixLoading::LayerWise {
            return;
        }
        let scheduled = std::mem::take(&mut self.scheduled);
        for (number, _) in &scheduled {
            legs.extend(self.take_prefix(*number).into_iter().flatten());
        }
        self.scheduled = scheduled;
    }

    /// Returns the transfers of a prefix that is not loaded yet, once.
    fn take_prefix(&mut self, number: u32) -> Option<[(ChannelKind, u64); 3]> {
        let live = &mut self.requests[number as usize];
        let source = channel_of(live.spec.source).filter(|_| live.prefix_bytes > 0)?;
        let bytes = std::mem::take(&mut live.prefix_bytes);
        Some([(source, bytes), (ChannelKind::LinkIn, bytes), (ChannelKind::Hbm, bytes)])
    }
}

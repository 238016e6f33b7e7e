//! Parts that benchmarks have in common: settings, layouts, report ([`report`]), fixture ([`fixture`]), references
//! ([`reference_pool`]) and the requirements that are checked before a run ([`preflight`]).

pub mod directory_service;
pub mod fixture;
pub mod pool_file;
pub mod preflight;
pub mod process_memory;
pub mod reference_pool;
pub mod report;

use std::path::PathBuf;

use indicatif::ProgressFinish;
use reprise_policy::{Layout, LayoutSpec};

use crate::output::Audience;

/// Default number of repetitions. Medians of five still vary by several per cent on a shared machine.
pub const REPETITIONS: usize = 11;

/// Settings of all benchmarks.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory of files.
    pub directory: PathBuf,
    /// Number of repetitions of each measurement.
    pub repetitions: usize,
    /// Reader of the output.
    pub audience: Audience,
}

impl Settings {
    /// Iterates over the configured repetitions and shows a progress bar on a terminal.
    pub fn rounds(&self, label: &'static str) -> impl Iterator<Item = usize> + use<> {
        self.some_rounds(label, self.repetitions)
    }

    /// Like [`Settings::rounds`], with another number of repetitions.
    pub fn some_rounds(&self, label: &'static str, count: usize) -> impl Iterator<Item = usize> + use<> {
        let bar = self.audience.progress(count as u64, label).with_finish(ProgressFinish::AndClear);
        // Draw the bar before the first round ends.
        bar.tick();
        bar.wrap_iter(0..count)
    }
}

/// Returns the layout of Llama-3-8B in blocks of 16 tokens: 64 objects of 32 KiB, 2 MiB per block.
pub fn llama_3_8b() -> Layout {
    layout(32, 8, 128, 16)
}

/// Returns a layout with 256 KiB per block of 16 tokens, for benchmarks of many loads.
pub fn quarter_mib() -> Layout {
    layout(8, 4, 128, 16)
}

/// Returns a layout with one page per block, for benchmarks of metadata.
pub fn one_page() -> Layout {
    layout(2, 1, 64, 8)
}

fn layout(layers: u16, kv_heads: u16, head_dim: u16, tokens_per_block: u16) -> Layout {
    let spec = LayoutSpec { layers, kv_heads, head_dim, tokens_per_block, ..LayoutSpec::LLAMA_3_8B };
    spec.validate().expect("dimensions are positive and the block is small")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_repeat_as_configured_without_a_bar_in_json_mode() {
        let audience = Audience::Program;
        assert!(audience.progress(1, "x").is_hidden());
        let settings = Settings { directory: PathBuf::new(), repetitions: 3, audience };
        assert_eq!(settings.rounds("x").collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(settings.some_rounds("x", 1).count(), 1);
    }
}

//! Conversion between slots of the window and paged KV memory: by a GPU, or by the host build of the kernels.

use reprise_buffers::Span;

use crate::copy::{CopyJob, CopyKind, HostSpans, KvLayout, copy_spans_on_host};
use crate::gpu::{DeviceMemory, GpuError, HostMemory};
use crate::kernels::DeviceLayout;
use crate::ring::Operation;
use crate::staged::{HostBlock, Staged};

/// What converts; see the module.
pub(super) enum Converter<'k> {
    Host { memory: Span, window: Span, layers: Vec<KvLayout> },
    Gpu { staged: Box<Staged<'k>>, window: HostMemory, layers: Vec<DeviceLayout> },
}

impl Converter<'_> {
    /// Creates the tables of layers in GPU memory.
    pub(super) fn device_layouts(
        layers: &[KvLayout],
        memory: &DeviceMemory,
    ) -> Result<Vec<DeviceLayout>, GpuError> {
        layers.iter().map(|layer| DeviceLayout::new(layer, memory)).collect()
    }

    /// Converts one layer: from slots to blocks for a read, from blocks to slots for a write. Returns when it has ended.
    pub(super) fn convert(
        &mut self,
        operation: Operation,
        layer: usize,
        jobs: &[CopyJob],
    ) -> Result<(), GpuError> {
        match self {
            Converter::Host { memory, window, layers } => {
                let kind = match operation {
                    Operation::Read => CopyKind::Scatter,
                    Operation::Write => CopyKind::Gather,
                };
                let layout = &layers[layer];
                let spans = HostSpans { pages: memory, slots: window, expected: &[] };
                copy_spans_on_host(kind, layout, spans, jobs, 0..layout.objects()).map(|_| ())
            }
            Converter::Gpu { staged, window, layers } => {
                let layout = &layers[layer];
                let bytes = layout.layout().slot_bytes();
                let block = |job: &CopyJob| HostBlock {
                    memory: window,
                    offset: u64::from(job.slot) * bytes,
                    block: job.block,
                };
                let blocks: Vec<HostBlock<'_>> = jobs.iter().map(block).collect();
                match operation {
                    Operation::Read => staged.load(layout, &blocks, &[]).map(|_| ()),
                    Operation::Write => staged.save(layout, &blocks).map(|_| ()),
                }
            }
        }
    }
}

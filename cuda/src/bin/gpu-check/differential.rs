//! Compares copy kernels with their host build on random layouts, and their checksums with another implementation.

use std::ops::Range;

use reprise_buffers::crc32c;
use reprise_cuda::copy::{CopyJob, CopyKind, CopyResult, HostCopy, KvLayout, copy_on_host};
use reprise_cuda::gpu::{DeviceMemory, HostMemory, Partition, SmShare, Stream};
use reprise_cuda::gpu_bench::Random;
use reprise_cuda::kernels::{DeviceLayout, Kernels, Slots};

use crate::Options;
use crate::steps::{StepError, checked};

/// A random copy with its memory.
struct Case {
    layout: KvLayout,
    jobs: Vec<CopyJob>,
    objects: Range<u32>,
    pages: Vec<u8>,
    slots: Vec<u8>,
    expected: Vec<u32>,
}

/// Compares all kinds of copies for a number of random cases.
pub(crate) fn run(kernels: &Kernels, options: &Options) -> Result<(), StepError> {
    let gpu = kernels.gpu();
    let partition = Partition::new(gpu, options.sms)?;
    let bounded = Partition::with_bounded_grid(gpu, SmShare::Count(2), &"requested");
    let streams = [Stream::new(gpu)?, partition.io_stream()?, bounded.io_stream()?];
    let cases = if options.small { 6 } else { 80 };
    let mut bytes = 0;
    for seed in 0..cases {
        let case = Case::new(seed, options.small)?;
        for kind in CopyKind::ALL {
            let stream = &streams[(seed % 3) as usize];
            compare(kernels, stream, &case, kind, seed)
                .map_err(|error| StepError(format!("seed {seed}, {kind:?}: {error:?}")))?;
            bytes += case.jobs.len() as u64 * case.layout.slot_bytes();
        }
    }
    checked(
        "copies and checksums",
        &format!("{cases} random layouts, 5 kernels, {} MiB: equal", bytes >> 20),
    );
    Ok(())
}

impl Case {
    fn new(seed: u64, small: bool) -> Result<Case, StepError> {
        let mut random = Random(seed);
        const SIZES: &[u32] = &[16, 48, 512, 528, 1008, 2048, 4096, 4112, 8192, 18432, 32768];
        let object_bytes = match random.below(3) {
            0 => 16 * (1 + random.below(2500) as u32),
            _ => SIZES[random.below(SIZES.len() as u64) as usize],
        };
        let most = if small { 6 } else { 40 };
        let (layers, parts) = (1 + random.below(5) as u32, 1 + random.below(2) as u32);
        let blocks = 1 + random.below(most) as u32;
        let shape = reprise_cuda::copy::KvShape { layers, parts, blocks, object_bytes };
        let layout = match random.below(5) {
            0 => KvLayout::block_major(shape)?,
            1 => KvLayout::layer_major(shape)?,
            2 => KvLayout::split(shape)?,
            3 => KvLayout::mla(layers, blocks, object_bytes)?,
            _ => with_gaps(&mut random, layers * parts, blocks, object_bytes)?,
        };
        let slot_count = blocks + random.below(4) as u32;
        let count = 1 + random.below(u64::from(blocks)) as usize;
        let sources = random.permutation(blocks);
        let targets = random.permutation(slot_count);
        let pair = |(&block, &slot): (&u32, &u32)| CopyJob { block, slot };
        let jobs: Vec<CopyJob> = sources.iter().zip(&targets).take(count).map(pair).collect();
        let first = random.below(u64::from(layout.objects())) as u32;
        let last = first + 1 + random.below(u64::from(layout.objects() - first)) as u32;
        let mut pages = vec![0; layout.end() as usize];
        let mut slots = vec![0; (u64::from(slot_count) * layout.slot_bytes()) as usize];
        random.fill(&mut pages);
        random.fill(&mut slots);
        let total = jobs.len() * (last - first) as usize;
        let expected = (0..total).map(|_| random.draw() as u32).collect();
        Ok(Case { layout, jobs, objects: first..last, pages, slots, expected })
    }

    /// Replaces expected checksums by the right ones, except those of every third object.
    fn expect(&mut self, checksums: &[u32]) {
        for (index, (expected, &right)) in self.expected.iter_mut().zip(checksums).enumerate() {
            *expected = if index % 3 == 2 { !right } else { right };
        }
    }

    /// Returns the checksums of the objects in slots or pages, computed by another implementation.
    fn checksums(&self, kind: CopyKind) -> Vec<u32> {
        let bytes = self.layout.object_bytes() as usize;
        let mut checksums = Vec::new();
        for job in &self.jobs {
            for object in self.objects.clone() {
                let slot = u64::from(job.slot) * self.layout.slot_bytes() + u64::from(object) * bytes as u64;
                let offset = self.layout.offsets()[object as usize];
                let page = offset + u64::from(job.block) * self.layout.block_stride();
                let source = match kind {
                    CopyKind::Gather | CopyKind::GatherChecked => &self.pages[page as usize..],
                    _ => &self.slots[slot as usize..],
                };
                checksums.push(crc32c(&source[..bytes]));
            }
        }
        checksums
    }
}

/// A layout whose objects are in random order with gaps between them, as separate tensors are.
fn with_gaps(
    random: &mut Random,
    objects: u32,
    blocks: u32,
    object_bytes: u32,
) -> Result<KvLayout, StepError> {
    let stride = u64::from(object_bytes) + 16 * random.below(20);
    let mut next = 16 * random.below(10);
    let mut offsets = vec![0; objects as usize];
    for index in random.permutation(objects) {
        offsets[index as usize] = next;
        next += stride * u64::from(blocks) + 16 * random.below(100);
    }
    Ok(KvLayout::new(offsets, stride, blocks, object_bytes)?)
}

/// Runs one kind on GPU and host and compares all memory, including bytes that no copy may change.
fn compare(
    kernels: &Kernels,
    stream: &Stream,
    case: &Case,
    kind: CopyKind,
    seed: u64,
) -> Result<(), StepError> {
    let reference = case.checksums(kind);
    let mut case = Case {
        layout: case.layout.clone(),
        jobs: case.jobs.clone(),
        objects: case.objects.clone(),
        pages: case.pages.clone(),
        slots: case.slots.clone(),
        expected: case.expected.clone(),
    };
    case.expect(&reference);
    let expected: &[u32] = if kind.has_checksums() { &case.expected } else { &[] };
    let gpu = kernels.gpu();
    let pages = DeviceMemory::with_contents(gpu, &case.pages)?;
    // Every other case has its slots in host memory, which the kernels access over PCIe.
    let (mut pages_found, mut slots_found) = (vec![0; case.pages.len()], vec![0; case.slots.len()]);
    let layout = DeviceLayout::new(&case.layout, &pages)?;
    let stride = case.layout.slot_bytes();
    let count = (case.slots.len() as u64 / stride) as u32;
    let bytes = case.slots.len() as u64;
    let result = if seed.is_multiple_of(2) {
        let slots = DeviceMemory::with_contents(gpu, &case.slots)?;
        let place = Slots::on_gpu(&slots, stride, count)?;
        let jobs = layout.jobs(place, &case.jobs, case.objects.clone(), expected)?;
        kernels.copy(stream, kind, &jobs)?;
        stream.synchronize()?;
        slots.read(0, &mut slots_found)?;
        jobs.result()?
    } else {
        let slots = HostMemory::new(gpu, bytes)?;
        slots.write(0, &case.slots)?;
        let place = Slots::on_host(&slots, stride, count)?;
        let jobs = layout.jobs(place, &case.jobs, case.objects.clone(), expected)?;
        kernels.copy(stream, kind, &jobs)?;
        stream.synchronize()?;
        slots.read(0, &mut slots_found)?;
        jobs.result()?
    };
    pages.read(0, &mut pages_found)?;
    let memory = HostCopy { pages: &mut case.pages, slots: &mut case.slots, expected };
    let host = copy_on_host(kind, &case.layout, memory, &case.jobs, case.objects.clone())?;
    same("pages", &pages_found, &case.pages)?;
    same("slots", &slots_found, &case.slots)?;
    if kind.has_checksums() {
        same_checksums(&result, &host, &reference)?;
    }
    Ok(())
}

fn same_checksums(gpu: &CopyResult, host: &CopyResult, reference: &[u32]) -> Result<(), StepError> {
    if gpu.checksums != reference || host.checksums != reference {
        let differ = |found: &[u32]| found.iter().zip(reference).filter(|(a, b)| a != b).count();
        return Err(StepError(format!(
            "{} (GPU) and {} (host build) of {} checksums are wrong",
            differ(&gpu.checksums),
            differ(&host.checksums),
            reference.len()
        )));
    }
    if gpu.mismatches != host.mismatches {
        return Err(StepError(format!(
            "mismatches {:?} on the GPU, {:?} in the host build",
            gpu.mismatches, host.mismatches
        )));
    }
    Ok(())
}

fn same(what: &str, gpu: &[u8], host: &[u8]) -> Result<(), StepError> {
    match gpu.iter().zip(host).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => {
            let count = gpu.iter().zip(host).filter(|(a, b)| a != b).count();
            Err(StepError(format!("{count} of {} bytes of the {what} differ, first at {at}", gpu.len())))
        }
    }
}

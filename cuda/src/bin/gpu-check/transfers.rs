//! Loads and saves through small windows, with every byte of host and GPU memory compared.

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, crc32c};
use reprise_cuda::copy::{KvLayout, KvShape};
use reprise_cuda::gpu::{DeviceMemory, HostMemory, Partition};
use reprise_cuda::gpu_bench::Random;
use reprise_cuda::kernels::{DeviceLayout, Kernels};
use reprise_cuda::staged::{HostBlock, Staged};

use crate::Options;
use crate::steps::{StepError, checked};

/// Host memory of one case: two arena regions and pinned memory, each with room for all blocks.
struct Host {
    memories: Vec<HostMemory>,
    _arena: Arena,
}

impl Host {
    fn new(kernels: &Kernels, bytes: u64) -> Result<Host, StepError> {
        let bytes = bytes.next_multiple_of(4096);
        let failed = |error: reprise_buffers::BufferError| StepError(format!("no arena: {error}"));
        let config = ArenaConfig { bytes: 2 * bytes, region_bytes: bytes, huge: HugePolicy::Never };
        let arena = Arena::new(&config).map_err(failed)?;
        let mut memories = Vec::new();
        for region in arena.regions() {
            let span = region.span(0, bytes).map_err(failed)?;
            memories.push(HostMemory::register(kernels.gpu(), &span)?);
        }
        memories.push(HostMemory::new(kernels.gpu(), bytes)?);
        Ok(Host { memories, _arena: arena })
    }
}

/// Runs random loads and saves.
pub(crate) fn run(kernels: &Kernels, options: &Options) -> Result<(), StepError> {
    let partition = Partition::new(kernels.gpu(), options.sms)?;
    let cases = if options.small { 4 } else { 40 };
    for seed in 0..cases {
        case(kernels, &partition, seed)
            .map_err(|StepError(reason)| StepError(format!("seed {seed}: {reason}")))?;
    }
    checked("loads and saves", &format!("{cases} random transfers through windows of 2 to 8 slots: equal"));
    Ok(())
}

fn case(kernels: &Kernels, partition: &Partition, seed: u64) -> Result<(), StepError> {
    let mut random = Random(seed);
    let (layers, parts, blocks) =
        (1 + random.below(3) as u32, 1 + random.below(2) as u32, 1 + random.below(24) as u32);
    let shape = KvShape { layers, parts, blocks, object_bytes: 16 * (1 + random.below(300) as u32) };
    let layout = match random.below(3) {
        0 => KvLayout::block_major(shape)?,
        1 => KvLayout::layer_major(shape)?,
        _ => KvLayout::split(shape)?,
    };
    let bytes = layout.slot_bytes();
    let host = Host::new(kernels, u64::from(blocks) * bytes)?;
    let mut contents = vec![0; (u64::from(blocks) * bytes) as usize];
    for memory in &host.memories {
        random.fill(&mut contents);
        memory.write(0, &contents)?;
    }
    let mut pages = vec![0; layout.end() as usize];
    random.fill(&mut pages);
    let device = DeviceMemory::with_contents(kernels.gpu(), &pages)?;
    let table = DeviceLayout::new(&layout, &device)?;
    let mut staged = Staged::new(kernels, partition, bytes, (2 + random.below(7)) * bytes)?;

    // Some of the blocks, in places that may follow each other.
    let count = 1 + random.below(u64::from(blocks)) as usize;
    let place = |(index, block): (usize, u32)| HostBlock {
        memory: &host.memories[index / 5 % 3],
        offset: index as u64 * bytes,
        block,
    };
    let loaded: Vec<HostBlock<'_>> =
        random.permutation(blocks).into_iter().take(count).enumerate().map(place).collect();
    let (expected, damaged) = expect(&layout, &loaded, &mut random)?;
    let result = staged.load(&table, &loaded, &expected)?;
    let wrong: Vec<usize> = (0..count).filter(|&index| result.mismatches[index] != 0).collect();
    if wrong != damaged {
        return Err(StepError(format!("blocks {wrong:?} are reported as damaged, expected {damaged:?}")));
    }
    apply(&layout, &loaded, &mut pages)?;
    let mut found = vec![0; pages.len()];
    device.read(0, &mut found)?;
    if found != pages {
        return Err(StepError("pages differ after a load".to_owned()));
    }

    // Back to other places.
    let target = &host.memories[2];
    let saved: Vec<HostBlock<'_>> = loaded
        .iter()
        .rev()
        .enumerate()
        .map(|(index, block)| HostBlock { memory: target, offset: index as u64 * bytes, block: block.block })
        .collect();
    let result = staged.save(&table, &saved)?;
    let (right, _) = expect(&layout, &saved, &mut Random(u64::MAX))?;
    let mut check = vec![0; pages.len()];
    check.copy_from_slice(&pages);
    apply(&layout, &saved, &mut check)?;
    if check != pages {
        return Err(StepError("saved blocks differ from their pages".to_owned()));
    }
    let damaged = right.iter().zip(&result.checksums).filter(|(right, found)| right != found).count();
    // `expect` damages one checksum.
    if damaged != 1 {
        return Err(StepError(format!("{} checksums of saved blocks are wrong", damaged.abs_diff(1))));
    }
    Ok(())
}

/// Returns the checksums of the objects of blocks in host memory, one of them wrong, and the block of that one.
fn expect(
    layout: &KvLayout,
    blocks: &[HostBlock<'_>],
    random: &mut Random,
) -> Result<(Vec<u32>, Vec<usize>), StepError> {
    let mut contents = vec![0; layout.slot_bytes() as usize];
    let mut expected = Vec::new();
    for block in blocks {
        block.memory.read(block.offset, &mut contents)?;
        expected.extend(contents.chunks_exact(layout.object_bytes() as usize).map(crc32c));
    }
    let wrong = random.below(expected.len() as u64) as usize;
    expected[wrong] ^= 1 << random.below(32);
    Ok((expected, vec![wrong / layout.objects() as usize]))
}

/// Copies blocks of host memory to their pages, object by object.
fn apply(layout: &KvLayout, blocks: &[HostBlock<'_>], pages: &mut [u8]) -> Result<(), StepError> {
    let object = layout.object_bytes() as usize;
    let mut contents = vec![0; layout.slot_bytes() as usize];
    for block in blocks {
        block.memory.read(block.offset, &mut contents)?;
        for (index, offset) in layout.offsets().iter().enumerate() {
            let page = (offset + u64::from(block.block) * layout.block_stride()) as usize;
            pages[page..][..object].copy_from_slice(&contents[index * object..][..object]);
        }
    }
    Ok(())
}

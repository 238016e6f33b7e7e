//! The driver through VFIO: commands, queue pairs in all kinds of memory, errors that the device reports.

use std::fs::File;
use std::os::unix::fs::FileExt;

use reprise_nvme::spec::{READ, Status, WRITE};
use reprise_nvme::vfio::{PciFunction, VfioMemory};
use reprise_nvme::{Backing, DataFormat, DmaMemory, Piece, QueueMemory, QueueSizes};

use crate::lab::{self, BLOCK, Lab, load, pattern, store};
use crate::{Outcome, ensure, test};

const PAGE: u64 = 4096;
/// Place that the last test compares with what the kernel's driver reads.
const KEPT_LBA: u64 = 96 << 10;
const KEPT_BYTES: u64 = 1 << 20;
/// Sizes of QEMU's buffer and of the peer's BAR.
const CMB_BYTES: usize = 16 << 20;
const PEER_BYTES: u64 = 16 << 20;

pub(crate) fn run(function: &PciFunction, peer: &PciFunction, bad: u64) -> bool {
    let mut passed = true;
    let mut on_lab = |name: &str, body: &dyn Fn(&mut Lab) -> Outcome| {
        passed &= test(name, || body(&mut Lab::open(function)?));
    };
    on_lab("identify", &identify);
    on_lab("transfers-prp", &|lab| transfers(lab, DataFormat::Prp));
    on_lab("transfers-sgl", &|lab| transfers(lab, DataFormat::Sgl));
    on_lab("scattered-sgl", &scattered_sgl);
    on_lab("depths", &depths);
    on_lab("queue-pairs", &queue_pairs);
    on_lab("abort-and-events", &abort_and_events);
    on_lab("peer-disabled", &|lab| peer_disabled(lab, peer));
    on_lab("peer-data", &|lab| peer_data(lab, peer));
    on_lab("peer-queues", &|lab| peer_queues(lab, peer));
    on_lab("peer-bar-too-small", &|lab| peer_too_small(lab, peer));
    on_lab("memory-buffer", &memory_buffer);
    on_lab("media-error", &|lab| media_error(lab, bad));
    on_lab("out-of-range", &out_of_range);
    on_lab("memory-ends", &memory_ends);
    on_lab("shutdown", &shutdown);
    passed
}

fn identify(lab: &mut Lab) -> Outcome {
    let (identity, controller) = (lab.controller.identity().clone(), &lab.controller);
    println!(
        "{} {} version {}, data as {}, {} queue pairs of up to {} entries",
        identity.model,
        identity.serial,
        controller.version(),
        controller.data_format(),
        controller.granted(),
        controller.entries_max()
    );
    ensure(identity.serial == "reprise-lab", "serial number")?;
    ensure(controller.data_format() == DataFormat::Sgl, "QEMU has SGLs")?;
    ensure(controller.granted() == 64, "64 queue pairs")?;
    let namespaces = controller.namespaces();
    ensure(namespaces.iter().map(|one| one.id).collect::<Vec<_>>() == [1, 2], format!("{namespaces:?}"))?;
    let health = lab.controller.health()?;
    println!("health: {health:?}");
    Ok(())
}

/// Writes on one queue and reads on another, at sizes that need no list, a list, and the largest one.
fn transfers(lab: &mut Lab, format: DataFormat) -> Outcome {
    let (mut out, mut back) = (lab.controller.create_queue_pair(64)?, lab.controller.create_queue_pair(64)?);
    let max = lab.controller.transfer_max().min(2 << 20);
    for (seed, bytes) in (1..).zip([PAGE, 2 * PAGE, 3 * PAGE, 32 << 10, max]) {
        let lba = seed * 4096;
        lab.fill(0, bytes, seed);
        lab.span(4 << 20, bytes).copy_in(&vec![0; bytes as usize])?;
        lab::expect(Lab::transfer(format, &mut out, (WRITE, 1, lba), &[lab.piece(0, bytes)])?)?;
        // Backwards in memory, page by page.
        let pages = bytes / PAGE;
        let pieces: Vec<Piece> =
            (0..pages).map(|page| lab.piece((4 << 20) + (pages - 1 - page) * PAGE, PAGE)).collect();
        let pieces = if format == DataFormat::Sgl && pages > 256 { vec![] } else { pieces };
        let forward = [lab.piece(4 << 20, bytes)];
        let used = if pieces.is_empty() { &forward[..] } else { &pieces };
        lab::expect(Lab::transfer(format, &mut back, (READ, 1, lba), used)?)?;
        let expected = pattern(seed, bytes);
        let read = lab.contents(4 << 20, bytes);
        let same = match pieces.is_empty() {
            true => read == expected,
            false => read.rchunks_exact(PAGE as usize).eq(expected.chunks_exact(PAGE as usize)),
        };
        ensure(same, format!("{bytes} bytes differ"))?;
    }
    Ok(())
}

/// Pieces that are not pages, which only SGLs describe.
fn scattered_sgl(lab: &mut Lab) -> Outcome {
    let mut queue = lab.controller.create_queue_pair(16)?;
    lab.fill(0, PAGE, 9);
    lab.write(&mut queue, 8, &[lab.piece(0, PAGE)])?;
    let (first, second) = (lab.piece(PAGE + 16, 1000), lab.piece(3 * PAGE + 512, PAGE - 1000));
    lab.read(&mut queue, 8, &[first, second])?;
    let mut read = lab.contents(PAGE + 16, 1000);
    read.extend(lab.contents(3 * PAGE + 512, PAGE - 1000));
    ensure(read == pattern(9, PAGE), "scattered bytes differ")
}

/// Fills queues of many depths, several times around the ring.
fn depths(lab: &mut Lab) -> Outcome {
    lab.fill(0, PAGE, 3);
    for entries in [2, 3, 4, 7, 64, 255, 1024, 2048] {
        let mut queue = lab.controller.create_queue_pair(entries)?;
        ensure(queue.entries() == entries, format!("{} entries", queue.entries()))?;
        lab.write(&mut queue, 16, &[lab.piece(0, PAGE)])?;
        let (total, mut sent, mut ended) = (3 * entries as usize, 0, 0);
        let mut seen = vec![false; total];
        while ended < total {
            while sent < total && queue.free() > 0 {
                let at = PAGE + (sent as u64 % 512) * PAGE;
                let data = lab.controller.data_format().describe(&queue, &[lab.piece(at, PAGE)])?;
                let command = reprise_nvme::spec::Command::transfer(READ, 1, 16, 8).with_data(data);
                queue.submit(&command, sent as u64, std::time::Instant::now() + lab::LONG)?;
                sent += 1;
            }
            queue.ring();
            for one in lab::wait(&mut queue, 1)? {
                lab::expect(one.status)?;
                ensure(!std::mem::replace(&mut seen[one.token as usize], true), "a command ended twice")?;
                ended += 1;
            }
        }
        ensure(lab.contents(PAGE, PAGE) == pattern(3, PAGE), "bytes differ")?;
        lab.controller.delete_queue_pair(queue)?;
    }
    Ok(())
}

/// All queue pairs that the controller grants, and no further one.
fn queue_pairs(lab: &mut Lab) -> Outcome {
    let mut queues = Vec::new();
    for _ in 0..lab.controller.granted() {
        queues.push(lab.controller.create_queue_pair(16)?);
    }
    let refused = lab.controller.create_queue_pair(16).expect_err("all are in use").to_string();
    ensure(refused.contains("the controller has granted 64"), refused)?;
    lab.fill(0, PAGE, 4);
    for (lba, queue) in (0..).step_by(8).zip(&mut queues) {
        lab.write(queue, lba, &[lab.piece(0, PAGE)])?;
        lab.read(queue, lba, &[lab.piece(PAGE, PAGE)])?;
    }
    for queue in queues {
        lab.controller.delete_queue_pair(queue)?;
    }
    ensure(lab.contents(PAGE, PAGE) == pattern(4, PAGE), "bytes differ")
}

fn abort_and_events(lab: &mut Lab) -> Outcome {
    lab.controller.request_event()?;
    let mut queue = lab.controller.create_queue_pair(16)?;
    let data = lab.controller.data_format().describe(&queue, &[lab.piece(0, PAGE)])?;
    let command = reprise_nvme::spec::Command::transfer(READ, 1, 0, 8).with_data(data);
    let id = queue.submit(&command, 1, std::time::Instant::now() + lab::LONG)?;
    queue.ring();
    ensure(lab.controller.request_abort(queue.id(), id)?, "an abort is possible")?;
    let ended = lab::wait(&mut queue, 1)?;
    let status = ended[0].status;
    ensure(status.is_success() || reprise_nvme::was_aborted(status), format!("status {status}"))?;
    ensure(lab.controller.take_events()?.is_empty(), "no event has occurred")?;
    lab.read(&mut queue, 0, &[lab.piece(0, PAGE)])
}

/// A function without a driver decodes no accesses to its BARs. Enables it.
fn peer_disabled(lab: &mut Lab, peer: &PciFunction) -> Outcome {
    let refused = lab.controller.backing().map_peer(peer, 2, PEER_BYTES).expect_err("disabled").to_string();
    ensure(refused.contains("is disabled"), refused)?;
    Ok(std::fs::write(format!("/sys/bus/pci/devices/{}/enable", peer.address()), "1")?)
}

/// The data of commands in another device's BAR.
fn peer_data(lab: &mut Lab, peer: &PciFunction) -> Outcome {
    let memory = lab.controller.backing().map_peer(peer, 2, PEER_BYTES)?;
    let mut queue = lab.controller.create_queue_pair(16)?;
    let piece = |at: u64| Piece { address: memory.address() + at, bytes: PAGE };
    store(&memory, 0, &vec![0xee; 3 * PAGE as usize]);
    lab.fill(0, PAGE, 5);
    lab.write(&mut queue, 32, &[lab.piece(0, PAGE)])?;
    lab.read(&mut queue, 32, &[piece(PAGE)])?;
    ensure(load(&memory, PAGE as usize, PAGE as usize) == pattern(5, PAGE), "the BAR differs")?;
    ensure(load(&memory, 0, PAGE as usize).iter().all(|byte| *byte == 0xee), "the page before was written")?;
    store(&memory, 0, &pattern(6, PAGE));
    lab.write(&mut queue, 40, &[piece(0)])?;
    lab.read(&mut queue, 40, &[lab.piece(PAGE, PAGE)])?;
    ensure(lab.contents(PAGE, PAGE) == pattern(6, PAGE), "the disk differs")
}

/// Entries, lists and data in another device's BAR: the layout of a GPU that issues commands itself.
fn peer_queues(lab: &mut Lab, peer: &PciFunction) -> Outcome {
    const ENTRIES: u32 = 64;
    let memory = lab.controller.backing().map_peer(peer, 2, PEER_BYTES)?;
    // What an earlier owner left: completions with the phase that the queue expects first.
    store(&memory, 0, &vec![0xff; QueueSizes::of(ENTRIES).total()]);
    let parts = QueueMemory::within(&memory, 0, ENTRIES)?;
    rounds(lab, parts, ENTRIES, &memory, QueueSizes::of(ENTRIES).total())
}

fn peer_too_small(lab: &mut Lab, peer: &PciFunction) -> Outcome {
    for (bar, needed) in [(2, PEER_BYTES + 1), (5, 1)] {
        let refused =
            lab.controller.backing().map_peer(peer, bar, needed).expect_err("too small").to_string();
        ensure(refused.contains("Resizable BAR"), refused)?;
    }
    let memory = lab.controller.backing().map_peer(peer, 2, PEER_BYTES)?;
    let refused = QueueMemory::within(&memory, (PEER_BYTES - PAGE) as usize, 64).expect_err("at its end");
    ensure(refused.to_string().contains("use a larger BAR"), refused.to_string())
}

/// Submissions, lists and data in the controller's memory buffer. QEMU's takes no completion queues.
fn memory_buffer(lab: &mut Lab) -> Outcome {
    const ENTRIES: u32 = 64;
    let (properties, memory) = lab.controller.memory_buffer()?;
    println!("controller memory buffer: {properties:?}");
    ensure(memory.bytes() == CMB_BYTES && properties.submissions && properties.data, "its properties")?;
    let sizes = QueueSizes::of(ENTRIES);
    let parts = QueueMemory {
        submissions: memory.part(0, sizes.submissions)?,
        completions: lab.controller.backing().allocate(sizes.completions)?,
        lists: memory.part(sizes.submissions, sizes.lists)?,
    };
    rounds(lab, parts, ENTRIES, &memory, sizes.submissions + sizes.lists)
}

/// Reads and writes many times around the ring of a queue pair in given memory, with data in `memory` from an offset on.
fn rounds(
    lab: &mut Lab,
    parts: QueueMemory<VfioMemory>,
    entries: u32,
    memory: &VfioMemory,
    at: usize,
) -> Outcome {
    let mut queue = lab.controller.create_queue_pair_in(entries, parts)?;
    for round in 0..4 * u64::from(entries) {
        let lba = 1024 + round * 16;
        let pieces = |from: usize| -> Vec<Piece> {
            let address = memory.address() + from as u64;
            // Two pieces in reverse order: a list is needed.
            vec![Piece { address: address + PAGE, bytes: PAGE }, Piece { address, bytes: PAGE }]
        };
        let data = pattern(round + 1, 2 * PAGE);
        store(memory, at, &data);
        lab.write(&mut queue, lba, &pieces(at))?;
        let back = at + 2 * PAGE as usize;
        lab.read(&mut queue, lba, &pieces(back))?;
        ensure(load(memory, back, 2 * PAGE as usize) == data, format!("round {round}: bytes differ"))?;
    }
    lab.controller.delete_queue_pair(queue)?;
    Ok(())
}

/// A block that the emulator fails to read. Its neighbours can be read.
fn media_error(lab: &mut Lab, bad: u64) -> Outcome {
    let mut queue = lab.controller.create_queue_pair(16)?;
    let format = lab.controller.data_format();
    let mut read = |lba: u64| Lab::transfer(format, &mut queue, (READ, 2, lba), &[lab.piece(0, PAGE)]);
    let status = read(bad)?;
    println!("status of block {bad}: {status}");
    // Status code type 2, status code 0x81: Unrecovered Read Error.
    ensure(status.code() == Status(0x281), format!("status {status}"))?;
    for neighbour in [bad - 8, bad + 8] {
        lab::expect(read(neighbour)?)?;
    }
    Ok(())
}

fn out_of_range(lab: &mut Lab) -> Outcome {
    let mut queue = lab.controller.create_queue_pair(16)?;
    let blocks = lab.controller.namespaces()[0].blocks;
    let format = lab.controller.data_format();
    let status = Lab::transfer(format, &mut queue, (READ, 1, blocks), &[lab.piece(0, PAGE)])?;
    ensure(status.code() == Status::OUT_OF_RANGE, format!("status {status}"))?;
    lab.read(&mut queue, blocks - 8, &[lab.piece(0, PAGE)])
}

/// Memory that was dropped is no longer mapped: another allocation does not get its address soon.
fn memory_ends(lab: &mut Lab) -> Outcome {
    let backing = lab.controller.backing();
    let first = backing.allocate(1 << 20)?;
    let (address, part) = (first.address(), first.part(4096, 8192)?);
    drop(first);
    part.word(8184).store(7, std::sync::atomic::Ordering::Relaxed);
    drop(part);
    for _ in 0..1000 {
        ensure(backing.allocate(4096)?.address() != address, "an address was used again at once")?;
    }
    Ok(())
}

fn shutdown(lab: &mut Lab) -> Outcome {
    let mut queue = lab.controller.create_queue_pair(16)?;
    lab.fill(0, KEPT_BYTES, 77);
    let step = lab.controller.transfer_max().min(512 << 10);
    for at in (0..KEPT_BYTES).step_by(step as usize) {
        lab.write(&mut queue, KEPT_LBA + at / BLOCK, &[lab.piece(at, step)])?;
    }
    lab.controller.shut_down()?;
    Ok(())
}

/// Gives the controller back: the kernel's driver reads what this one has written.
pub(crate) fn seen_by_the_kernel(function: &PciFunction) -> bool {
    test("seen-by-the-kernel", || {
        function.release_to_kernel()?;
        let device = lab_device(function)?;
        let mut read = vec![0; KEPT_BYTES as usize];
        File::open(device)?.read_exact_at(&mut read, KEPT_LBA * BLOCK)?;
        ensure(read == pattern(77, KEPT_BYTES), "bytes differ")
    })
}

/// Waits for the first block device of the controller.
pub(crate) fn lab_device(function: &PciFunction) -> Outcome<std::path::PathBuf> {
    let start = std::time::Instant::now();
    loop {
        let names = function.block_devices();
        if let Some(name) = names.iter().find(|name| name.ends_with("n1")) {
            let path = std::path::Path::new("/dev").join(name);
            if File::open(&path).is_ok() {
                return Ok(path);
            }
        }
        ensure(start.elapsed() < lab::LONG, format!("the kernel has no block device: {names:?}"))?;
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

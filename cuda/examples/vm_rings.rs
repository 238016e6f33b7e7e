//! The host build of the rings on a real controller through VFIO, inside the virtual machine of `e2e/vm`: queues and data
//! lie in another device's BAR, which stands for a GPU's memory. Prints `TEST NAME rc=N`, 0 for a pass.
//!
//! `vm_rings CONTROLLER PEER BAD_BLOCK`: the controller is bound to vfio-pci, and namespace 2 has a block that cannot be
//! read.

#![allow(clippy::print_stdout, reason = "the console is the result")]

use std::error::Error;
use std::fs::File;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Duration;

use reprise_buffers::{MappedRegion, Span};
use reprise_cuda::ring::{
    BatchSettings, CONTEXTS_MAX, ContextStatus, HostRunner, Operation, OwnedQueue, QueueShape, Ring,
    RingMemory, RingSettings, Ticket, Transfer,
};
use reprise_nvme::spec::Status;
use reprise_nvme::vfio::{PciFunction, VfioController};
use reprise_nvme::{Backing, Controller, DmaMapping, DriverSettings};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const BAR_BYTES: u64 = 16 << 20;
/// Offset and size of the data in the BAR. The queues lie before.
const DATA_AT: u64 = 4 << 20;
const DATA_BYTES: u64 = 8 << 20;
const HALF: u64 = DATA_BYTES / 2;
const QUEUES: usize = 4;
const ENTRIES: u32 = 64;
const BLOCK: u64 = 512;
const LIMIT: Duration = Duration::from_secs(30);

/// Rings on a controller, and a window for data that both access.
struct Lab {
    runner: Option<HostRunner>,
    ring: Ring,
    owned: Vec<OwnedQueue<VfioController>>,
    mapping: DmaMapping,
    data: Span,
    controller: Controller<VfioController>,
}

fn ensure(condition: bool, text: impl Into<String>) -> Outcome {
    if condition { Ok(()) } else { Err(text.into().into()) }
}

fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..bytes / 8).flat_map(|_| next()).collect()
}

impl Lab {
    fn open(controller: &str, peer: &str) -> Outcome<Lab> {
        let backing = VfioController::open(PciFunction::new(controller.parse()?))?;
        let mut controller = Controller::start(backing, DriverSettings::default())?;
        let path = format!("/sys/bus/pci/devices/{peer}/resource2");
        let file = File::options().read(true).write(true).open(path)?;
        let bar = MappedRegion::of_bar(file.as_fd(), BAR_BYTES)?;
        let bytes = QueueShape::memory_bytes(ENTRIES, controller.data_format()) as u64;
        let mut owned = Vec::new();
        for index in 0..QUEUES as u64 {
            let memory = bar.span(index * bytes, bytes)?;
            memory.copy_in(&vec![0; bytes as usize])?;
            let memory = RingMemory::host(memory)?;
            owned.push(OwnedQueue::create(&mut controller, memory, ENTRIES, BLOCK as u32)?);
        }
        let data = bar.span(DATA_AT, DATA_BYTES)?;
        let mapping = controller.backing().map(&data)?;
        let settings = RingSettings { depth: 8, queues: QUEUES, entries_max: ENTRIES as usize };
        let mut ring = Ring::on_host(&settings)?;
        for (index, queue) in owned.iter().enumerate() {
            ring.init_queue(index, queue.for_host()?)?;
        }
        let runner = Some(HostRunner::start(&ring, 0..QUEUES)?);
        Ok(Lab { runner, ring, owned, mapping, data, controller })
    }

    /// Issues transfers in batches on all queues, and waits for them; returns the tickets in order.
    fn run(&mut self, operation: Operation, namespace: u32, transfers: &[Transfer]) -> Outcome<Vec<Ticket>> {
        let settings = BatchSettings { operation, namespace, timeout: Some(LIMIT), token: 0 };
        let mut tickets = Vec::new();
        for (index, part) in transfers.chunks(CONTEXTS_MAX.min(transfers.len().div_ceil(QUEUES))).enumerate()
        {
            let mut iocb = self.ring.get_iocb(&settings).ok_or("no batch is free")?;
            for transfer in part {
                ensure(iocb.push(transfer), "the batch has room")?;
            }
            tickets.push(iocb.issue_io(index % QUEUES)?);
        }
        for _ in &tickets {
            let cqe = self.ring.wait_cqe(LIMIT * 2).ok_or("a batch has not ended")?;
            ensure(cqe.given_up == 0 && tickets.contains(&cqe.ticket), format!("{cqe:?}"))?;
        }
        Ok(tickets)
    }

    /// Returns transfers of the half of the data from `from` on, in pieces of these sizes in turn.
    fn transfers(&self, from: u64, sizes: &[u32]) -> Vec<Transfer> {
        let (mut at, mut all) = (0, Vec::new());
        for bytes in sizes.iter().copied().cycle() {
            if at + u64::from(bytes) > HALF {
                return all;
            }
            let address = self.mapping.address() + from + at;
            all.push(Transfer { address, block: at / BLOCK, bytes, checksum: 0 });
            at += u64::from(bytes);
        }
        all
    }

    fn close(mut self) -> Outcome {
        drop(self.runner.take());
        for queue in &mut self.owned {
            queue.delete(&mut self.controller)?;
        }
        Ok(())
    }
}

/// Writes the first half of the data to the disk, and reads it to the second half in other pieces and another order.
fn between_bar_and_disk(lab: &mut Lab) -> Outcome {
    let (first, second) = (lab.data.slice(0, HALF as usize)?, lab.data.slice(HALF as usize, HALF as usize)?);
    for seed in 1..=3 {
        let expected = pattern(seed, HALF);
        first.copy_in(&expected)?;
        second.copy_in(&vec![0; HALF as usize])?;
        let out = lab.transfers(0, &[16 << 10, 4096, 12 << 10]);
        let mut back = lab.transfers(HALF, &[32 << 10]);
        back.reverse();
        for (operation, transfers) in [(Operation::Write, out), (Operation::Read, back)] {
            let tickets = lab.run(operation, 1, &transfers)?;
            let mut statuses = tickets.iter().flat_map(|ticket| lab.ring.statuses(*ticket));
            ensure(
                statuses.all(|status| status == ContextStatus::Done),
                format!("{operation:?} has failed"),
            )?;
        }
        let mut read = vec![0; HALF as usize];
        second.copy_out(&mut read);
        ensure(read == expected, format!("round {seed}: bytes differ"))?;
    }
    Ok(())
}

/// A block that cannot be read fails its context only.
fn media_error(lab: &mut Lab, bad: u64) -> Outcome {
    let address = lab.mapping.address();
    let transfer = |index: u64| {
        let block = bad - 64 + index * 8;
        Transfer { address: address + index * 4096, block, bytes: 4096, checksum: 0 }
    };
    let transfers: Vec<Transfer> = (0..16).map(transfer).collect();
    let tickets = lab.run(Operation::Read, 2, &transfers)?;
    let statuses: Vec<ContextStatus> = tickets.iter().flat_map(|ticket| lab.ring.statuses(*ticket)).collect();
    for (index, status) in (0..).zip(&statuses) {
        let expected = index == 8;
        let failed = matches!(status, ContextStatus::Failed(status) if status.code() == Status(0x281));
        ensure(failed == expected && (failed || *status == ContextStatus::Done), format!("{statuses:?}"))?;
    }
    ensure(statuses.len() == 16, format!("{} statuses", statuses.len()))
}

fn test(name: &str, result: &Outcome) -> bool {
    if let Err(error) = result {
        println!("{name}: {error}");
    }
    println!("TEST {name} rc={}", u8::from(result.is_err()));
    result.is_ok()
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [controller, peer, bad] = &arguments[..] else { return ExitCode::from(2) };
    let lab = Lab::open(controller, peer);
    let mut lab = match lab {
        Ok(lab) => lab,
        Err(error) => {
            println!("the rings cannot be started: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut passed = test("rings-between-bar-and-disk", &between_bar_and_disk(&mut lab));
    let bad = bad.parse().map_err(Into::into);
    passed &= test("rings-media-error", &bad.and_then(|bad| media_error(&mut lab, bad)));
    passed &= test("rings-end", &lab.close());
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

//! Requests on a stream: order of bytes and work, and streams that continue after failures.

use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use reprise_cuda::store::verify::{Contents, StreamWork, device_bytes, geometries, verify_streams};
use reprise_cuda::store::{
    BlockError, BlockPlace, DetachedRing, EngineStream, HostStream, KvGeometry, LayerRequest, MoveError,
    Point, RequestOrder,
};
use reprise_nvme::emulated::{Emulation, Fault, FaultRule, Selection};
use reprise_nvme::spec::READ;

use super::rig::{Kind, Rig, memory};

const BLOCKS: usize = 12;
const ROUNDS: u64 = 4;
const LONG: Duration = Duration::from_secs(60);

/// Four blocks, two on each device.
fn places(geometry: &KvGeometry) -> Vec<BlockPlace> {
    let extent = 4096 + (geometry.objects() * geometry.object_bytes) as u64;
    let place =
        |slot: usize| BlockPlace { device: slot % 2, payload: 4096 + (slot / 2) as u64 * extent, slot };
    (0..4).map(place).collect()
}

/// A stream that has stopped until the sender is used or dropped.
fn stopped(host: &HostStream) -> Sender<()> {
    let (open, gate) = channel();
    host.launch(move || gate.recv().unwrap_or(()));
    open
}

fn fill(contents: &Contents, value: u8) {
    let Contents::Host(span) = contents else { panic!("memory of this process") };
    span.copy_in(&vec![value; span.len()]).expect("writable");
}

fn first_bytes(contents: &Contents, geometry: &KvGeometry, layer: usize) -> Vec<u8> {
    let Contents::Host(span) = contents else { panic!("memory of this process") };
    let mut bytes = vec![0; span.len()];
    span.copy_out(&mut bytes);
    (0..4).map(|slot| bytes[geometry.offset(layer * geometry.parts, slot) as usize]).collect()
}

fn lose_reads(emulation: Emulation) -> Emulation {
    let on = Selection { opcode: Some(READ), times: Some(1), ..Selection::default() };
    Emulation { faults: vec![FaultRule { on, fault: Fault::Lost }], ..emulation }
}

#[test]
fn each_backend_keeps_the_order_of_a_stream_in_each_layout() {
    for (name, geometry) in geometries(BLOCKS) {
        for kind in Kind::ALL {
            let mut rig = Rig::new(kind, geometry);
            let Contents::Host(span) = &rig.memory else { panic!("memory of this process") };
            let stream = HostStream::start().expect("a thread");
            let snapshots = memory(StreamWork::snapshot_bytes(&geometry));
            let work = StreamWork::Host { stream, memory: span.clone(), snapshots };
            let (mover, memory, devices) = rig.parts();
            let verified = verify_streams(mover, &geometry, (memory, devices), &work, (3, ROUNDS));
            let counters = verified.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(counters.failed_blocks, 0, "{name}: {kind:?}");
            assert_eq!(rig.mover().given_up(), 0);
            rig.stop();
        }
    }
}

#[test]
fn block_that_fails_does_not_stop_the_stream_and_is_in_the_outcome() {
    let geometry = geometries(4)[1].1;
    for kind in [Kind::Rings, Kind::Gds, Kind::Staged] {
        let mut rig = Rig::new(kind, geometry);
        let host = HostStream::start().expect("a thread");
        let stream = EngineStream::on_host(&host);
        // The second block of device 1 lies behind this end.
        rig.cut(1, device_bytes(&geometry) / 9);
        fill(&rig.memory, 7);
        let blocks = places(&geometry);
        let order = RequestOrder::On(&stream);
        let request = LayerRequest { layer: 2, blocks: &blocks, timeout: LONG, order };
        let ticket = rig.mover().retrieve_layer(&request).expect("accepted");
        host.synchronize();
        assert_eq!(first_bytes(&rig.memory, &geometry, 2)[..3], [0, 0, 0], "{kind:?}: the others arrive");
        let outcome = rig.mover().poll(ticket).expect("open").expect("ended before the stream continued");
        assert_eq!(outcome.failures.iter().map(|failure| failure.block).collect::<Vec<_>>(), [3]);
        rig.stop();
    }
}

#[test]
fn stream_continues_at_the_deadline_of_a_device_that_hangs_although_no_thread_polls() {
    let geometry = geometries(4)[1].1;
    let mut rig = Rig::with_emulation(Kind::Rings, geometry, lose_reads);
    let host = HostStream::start().expect("a thread");
    let stream = EngineStream::on_host(&host);
    let (blocks, timeout) = (places(&geometry), Duration::from_millis(300));
    let request = LayerRequest { layer: 2, blocks: &blocks, timeout, order: RequestOrder::On(&stream) };
    let began = Instant::now();
    let ticket = rig.mover().retrieve_layer(&request).expect("accepted");
    host.synchronize();
    assert!((timeout..LONG).contains(&began.elapsed()), "{:?}", began.elapsed());
    let outcome = rig.mover().wait(ticket).expect("open");
    assert!(!outcome.failures.is_empty());
    assert!(outcome.failures.iter().all(|failure| failure.error == BlockError::TimedOut), "{outcome:?}");
    rig.stop();
}

#[test]
fn nothing_moves_if_the_deadline_passes_before_the_stream_arrives() {
    let geometry = geometries(4)[2].1;
    for kind in Kind::ALL {
        let mut rig = Rig::new(kind, geometry);
        let host = HostStream::start().expect("a thread");
        let stream = EngineStream::on_host(&host);
        fill(&rig.memory, 7);
        let (blocks, timeout) = (places(&geometry), Duration::from_millis(50));
        let open = stopped(&host);
        let request = LayerRequest { layer: 1, blocks: &blocks, timeout, order: RequestOrder::On(&stream) };
        let ticket = rig.mover().retrieve_layer(&request).expect("accepted");
        let outcome = rig.mover().wait(ticket).expect("open");
        assert_eq!(outcome.failures.len(), 4, "{kind:?}");
        drop(open);
        host.synchronize();
        assert_eq!(first_bytes(&rig.memory, &geometry, 1), [7; 4], "{kind:?}: KV memory has changed");
        assert_eq!(rig.mover().given_up(), 0, "{kind:?}");
        // The mover is usable as before.
        let request = LayerRequest { timeout: LONG, ..request };
        let ticket = rig.mover().retrieve_layer(&request).expect("accepted");
        host.synchronize();
        assert_eq!(first_bytes(&rig.memory, &geometry, 1), [0; 4], "{kind:?}");
        assert!(rig.mover().wait(ticket).expect("open").is_complete(), "{kind:?}");
        rig.stop();
    }
}

#[test]
fn drop_of_the_mover_releases_streams() {
    let geometry = geometries(4)[0].1;
    for kind in Kind::ALL {
        let mut rig = Rig::with_emulation(kind, geometry, lose_reads);
        let (host, other) = (HostStream::start().expect("a thread"), HostStream::start().expect("a thread"));
        let (stream, second) = (EngineStream::on_host(&host), EngineStream::on_host(&other));
        let (blocks, began) = (places(&geometry), Instant::now());
        // One request in flight: with rings, its reads never end.
        let order = RequestOrder::On(&second);
        let request = LayerRequest { layer: 0, blocks: &blocks, timeout: LONG, order };
        rig.mover().retrieve_layer(&request).expect("accepted");
        // Others wait for a stream that has stopped.
        let open = stopped(&host);
        for layer in 0..3 {
            let order = RequestOrder::On(&stream);
            let request = LayerRequest { layer, blocks: &blocks, timeout: LONG, order };
            rig.mover().store_layer(&request).expect("accepted");
        }
        rig.stop();
        other.synchronize();
        drop(open);
        host.synchronize();
        assert!(began.elapsed() < LONG / 2, "{kind:?}: {:?}", began.elapsed());
    }
}

#[test]
fn requests_that_have_ended_delay_no_stream_and_taken_ones_are_unknown() {
    let geometry = geometries(4)[0].1;
    for kind in Kind::ALL {
        let mut rig = Rig::new(kind, geometry);
        let host = HostStream::start().expect("a thread");
        let stream = EngineStream::on_host(&host);
        let blocks = places(&geometry);
        let point = stream.mark().expect("a mark");
        let order = RequestOrder::After(&point);
        let request = LayerRequest { layer: 0, blocks: &blocks, timeout: LONG, order };
        let ticket = rig.mover().store_layer(&request).expect("accepted");
        rig.mover().delay_stream(ticket, &stream).expect("open");
        rig.mover().delay_stream(ticket, &stream).expect("a stream may wait twice");
        host.synchronize();
        rig.mover().delay_stream(ticket, &stream).expect("it has ended");
        host.synchronize();
        assert!(rig.mover().wait(ticket).expect("open").is_complete(), "{kind:?}");
        let unknown = rig.mover().delay_stream(ticket, &stream).expect_err("taken");
        assert!(matches!(unknown, MoveError::UnknownTicket), "{unknown}");
        rig.stop();
    }
}

/// Asserts that the stream does not pass a point for a moment.
fn assert_waits(point: &Point, what: &str) {
    std::thread::sleep(Duration::from_millis(30));
    assert!(!point.has_passed().expect("no GPU"), "{what}");
}

#[test]
fn ready_requests_pass_a_request_whose_stream_has_stopped() {
    let geometry = geometries(4)[1].1;
    for kind in Kind::ALL {
        let mut rig = Rig::new(kind, geometry);
        let (host, other) = (HostStream::start().expect("a thread"), HostStream::start().expect("a thread"));
        let (stream, second) = (EngineStream::on_host(&host), EngineStream::on_host(&other));
        let blocks = places(&geometry);
        let open = stopped(&host);
        let request = |layer, order| LayerRequest { layer, blocks: &blocks, timeout: LONG, order };
        let mut retrieve =
            |layer, order| rig.mover().retrieve_layer(&request(layer, order)).expect("accepted");
        let waits = [retrieve(0, RequestOrder::On(&stream)), retrieve(1, RequestOrder::On(&stream))];
        let ready = [retrieve(2, RequestOrder::Unordered), retrieve(2, RequestOrder::On(&second))];
        let began = Instant::now();
        for ticket in ready {
            assert!(rig.mover().wait(ticket).expect("open").is_complete(), "{kind:?}");
        }
        assert!(began.elapsed() < LONG / 2, "{kind:?}: {:?}", began.elapsed());
        for ticket in waits {
            assert_eq!(rig.mover().poll(ticket).expect("open"), None, "{kind:?}: its stream has stopped");
        }
        drop(open);
        for ticket in waits {
            assert!(rig.mover().wait(ticket).expect("open").is_complete(), "{kind:?}");
        }
        rig.stop();
    }
}

#[test]
fn query_that_fails_for_a_while_delays_its_request_and_a_permanent_error_ends_it_only() {
    let geometry = geometries(4)[1].1;
    for kind in Kind::ALL {
        let mut rig = Rig::new(kind, geometry);
        let host = HostStream::start().expect("a thread");
        let stream = EngineStream::on_host(&host);
        let blocks = places(&geometry);
        let order = RequestOrder::On(&stream);
        let request = LayerRequest { layer: 0, blocks: &blocks, timeout: LONG, order };
        // As while another thread captures a graph.
        host.fail_queries(100, 900);
        let ticket = rig.mover().retrieve_layer(&request).expect("accepted");
        assert!(rig.mover().wait(ticket).expect("open").is_complete(), "{kind:?}");
        assert_eq!(host.failing_queries(), 0, "{kind:?}");
        // As after a kernel of the engine has failed.
        host.fail_queries(u32::MAX, 700);
        let ticket = rig.mover().retrieve_layer(&request).expect("accepted");
        let outcome = rig.mover().wait(ticket).expect("open");
        assert_eq!(outcome.failures.len(), 4, "{kind:?}");
        let text = outcome.failures[0].error.to_string();
        assert!(text.contains("query of an emulated stream") && text.contains("(700)"), "{kind:?}: {text}");
        host.fail_queries(0, 0);
        for order in [RequestOrder::Unordered, RequestOrder::On(&stream)] {
            let ticket = rig.mover().retrieve_layer(&LayerRequest { order, ..request }).expect("accepted");
            assert!(rig.mover().wait(ticket).expect("open").is_complete(), "{kind:?} works for others");
        }
        host.synchronize();
        rig.stop();
    }
}

#[test]
fn query_that_keeps_failing_ends_its_request_at_the_deadline() {
    let geometry = geometries(4)[1].1;
    for kind in Kind::ALL {
        let mut rig = Rig::new(kind, geometry);
        let host = HostStream::start().expect("a thread");
        let stream = EngineStream::on_host(&host);
        let (blocks, timeout) = (places(&geometry), Duration::from_millis(100));
        host.fail_queries(u32::MAX, 900);
        let request = LayerRequest { layer: 0, blocks: &blocks, timeout, order: RequestOrder::On(&stream) };
        let ticket = rig.mover().store_layer(&request).expect("accepted");
        let outcome = rig.mover().wait(ticket).expect("open");
        assert!(outcome.failures.iter().all(|failure| failure.error == BlockError::TimedOut), "{outcome:?}");
        assert_eq!((outcome.failures.len(), rig.mover().given_up()), (4, 0), "{kind:?}");
        host.synchronize();
        rig.stop();
    }
}

#[test]
fn stream_waits_for_commands_of_a_detached_ring_until_its_queue_pairs_are_deleted() {
    let geometry = geometries(4)[1].1;
    let mut rig = Rig::with_emulation(Kind::Rings, geometry, lose_reads);
    let (host, other) = (HostStream::start().expect("a thread"), HostStream::start().expect("a thread"));
    let (stream, second) = (EngineStream::on_host(&host), EngineStream::on_host(&other));
    let blocks = places(&geometry);
    let request = |order| LayerRequest { layer: 2, blocks: &blocks, timeout: LONG, order };
    let lost = rig.mover().retrieve_layer(&request(RequestOrder::On(&stream))).expect("accepted");
    // A request that has not begun: nothing of it runs.
    let open = stopped(&other);
    let waits = rig.mover().retrieve_layer(&request(RequestOrder::On(&second))).expect("accepted");
    let (point, free) = (stream.mark().expect("a mark"), second.mark().expect("a mark"));
    // Completions of the reads that are not lost.
    std::thread::sleep(Duration::from_millis(50));
    let detached = rig.rings().mover().detach_all();
    assert_eq!(detached.len(), 2);
    let outcome = rig.mover().wait(waits).expect("open");
    assert!(outcome.failures.iter().all(|failure| failure.error.to_string() == "the ring was stopped"));
    drop(open);
    other.synchronize();
    assert!(free.has_passed().expect("no GPU"), "nothing of its request runs");
    assert_waits(&point, "a command may still write the memory of the stream");
    assert_eq!(rig.mover().poll(lost).expect("open"), None);
    rig.rings().delete_queues().expect("confirmed");
    assert_waits(&point, "the mover does not know of the deletion");
    detached.into_iter().for_each(DetachedRing::release);
    host.synchronize();
    let outcome = rig.mover().wait(lost).expect("open");
    assert!(outcome.failures.iter().all(|failure| failure.error.to_string() == "the ring was stopped"));
    assert!(!outcome.failures.is_empty());
    assert_eq!(rig.mover().given_up(), 0);
}

#[test]
fn stream_of_a_ring_that_is_dropped_without_a_deletion_continues_at_the_deadline() {
    let geometry = geometries(4)[1].1;
    let mut rig = Rig::with_emulation(Kind::Rings, geometry, lose_reads);
    let host = HostStream::start().expect("a thread");
    let stream = EngineStream::on_host(&host);
    let (blocks, timeout) = (places(&geometry), Duration::from_millis(400));
    let request = LayerRequest { layer: 2, blocks: &blocks, timeout, order: RequestOrder::On(&stream) };
    fill(&rig.memory, 7);
    let began = Instant::now();
    rig.mover().retrieve_layer(&request).expect("accepted");
    let point = stream.mark().expect("a mark");
    // Later reads of a device have ended, so its lost one was posted. Files are zeroed.
    while !first_bytes(&rig.memory, &geometry, 2).contains(&0) {
        assert!(began.elapsed() < LONG, "the other reads end");
        std::thread::yield_now();
    }
    drop(rig);
    assert!(point.has_passed().is_ok_and(|passed| !passed || began.elapsed() >= timeout));
    host.synchronize();
    assert!((timeout..LONG).contains(&began.elapsed()), "{:?}", began.elapsed());
}

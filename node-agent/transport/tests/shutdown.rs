//! Shutdown ends every thread of a transport. A separate process, so that threads can be counted.

#[path = "harness/mod.rs"]
mod harness;

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use harness::{
    LATER, PATIENCE, Tracker, TransportHandle, arena, by_hand, key, recording_sink, small_layout, wanted,
};
use reprise_policy::peer::PeerEvent;
use reprise_transport::{TcpSettings, TcpTransport, Transport};

/// Returns the threads of this process whose name is one of the transport's.
fn transport_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs");
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| name.starts_with("peer-"))
        .collect()
}

/// Returns the threads that still exist some time later. The kernel wakes the joiner of a thread before it
/// removes the thread from `/proc`, so a joined thread may be listed for a moment.
fn remaining_threads() -> Vec<String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let threads = transport_threads();
        if threads.is_empty() || Instant::now() >= deadline {
            return threads;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn shutdown_joins_all_waiting_threads() {
    // No timeout ends a wait of a thread within this test.
    let settings = TcpSettings {
        stall_timeout: LATER,
        idle_timeout: LATER,
        ..TcpSettings::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), "node")
    };
    let own = TransportHandle::default();
    let (sink, events) = recording_sink(&own, by_hand());
    let transport =
        Arc::new(TcpTransport::bind(settings, arena(), sink).expect("listening on loopback works"));
    let shared: Arc<dyn Transport> = transport.clone();
    own.set(&shared);
    // Fetches from itself (the test does not answer), and from a peer that never greets.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback");
    let peers =
        [transport.local_address().to_string(), silent.local_addr().expect("it has an address").to_string()];
    let mut tracker = Tracker::default();
    for (fill, peer) in (0..).zip(&peers) {
        let wanted = wanted(small_layout(), &[key(0)], fill, LATER);
        tracker.expect(&wanted.request);
        transport.fetch(peer, wanted.request).expect("taken");
    }
    // A connection that has not greeted and one that has sent half of its greeting.
    let _quiet = TcpStream::connect(transport.local_address()).expect("connected");
    let mut half = TcpStream::connect(transport.local_address()).expect("connected");
    half.write_all(b"RPRSP").expect("sent");
    let request = events.recv_timeout(PATIENCE).expect("our own request arrives");
    assert!(matches!(request, reprise_transport::TransportEvent::Request { .. }), "{request:?}");
    assert!(!transport_threads().is_empty());

    let started = Instant::now();
    transport.shutdown();
    assert!(started.elapsed() < PATIENCE, "waited for a timeout: {:?}", started.elapsed());
    assert_eq!(remaining_threads(), Vec::<String>::new());

    // Every fetch and every serve was reported before `shutdown` returned.
    let mut aborted = 0;
    for event in events.try_iter() {
        match event {
            reprise_transport::TransportEvent::Peer(PeerEvent::ServeAborted { .. }) => aborted += 1,
            event => tracker.take(&event),
        }
    }
    assert!(tracker.is_over());
    assert_eq!(aborted, 1);
}

//! A proxy between two correct nodes that flips a bit or cuts the connection.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};

use reprise_policy::peer::FillError;
use reprise_transport::Transport;

use crate::harness::{Block, FillOutcome, by_hand, bytes_of, small_layout};
use crate::tcp::{Node, node, settings};

/// Effect of the proxy on the bytes from server to requester.
#[derive(Clone, Copy)]
enum Corruption {
    /// Flips the lowest bit of this byte of the stream.
    Flip(usize),
    /// Closes both sides before this byte.
    Cut(usize),
}

/// Size of the server's stream in bytes: greeting, then per block a header frame of 8 checksums and a data
/// frame.
const GREETING: usize = 128;
const HEADER_FRAME: usize = 32 + 4 + 8 * 4;
const DATA_FRAME: usize = 32 + 8 * 4096;

/// Starts a proxy for one connection; returns its address.
fn proxy(server: SocketAddr, corruption: Corruption) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback");
    let address = listener.local_addr().expect("it has an address").to_string();
    std::thread::spawn(move || {
        let (requester, _) = listener.accept().expect("a connection");
        let server = TcpStream::connect(server).expect("connected");
        let (mut up_from, mut up_to) =
            (requester.try_clone().expect("a clone"), server.try_clone().expect("a clone"));
        let upward = std::thread::spawn(move || {
            // Ends when either side is closed.
            let _ = std::io::copy(&mut up_from, &mut up_to);
            let _ = up_to.shutdown(Shutdown::Write);
        });
        downward(server, requester, corruption);
        upward.join().expect("the copying thread ends");
    });
    address
}

fn downward(mut from: TcpStream, mut to: TcpStream, corruption: Corruption) {
    let mut buffer = vec![0; 8 << 10];
    let mut at = 0;
    while let Ok(bytes) = from.read(&mut buffer) {
        let mut piece = &mut buffer[..bytes];
        match corruption {
            Corruption::Flip(byte) if (at..at + bytes).contains(&byte) => piece[byte - at] ^= 1,
            Corruption::Cut(byte) if at + bytes > byte => piece = &mut piece[..byte - at],
            _ => {}
        }
        if piece.is_empty() || to.write_all(piece).is_err() || piece.len() < bytes {
            break;
        }
        at += bytes;
    }
    // Either side may be closed already.
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

struct Outcome {
    outcomes: Vec<FillOutcome>,
    requester: Node,
}

/// Fetches four blocks through the proxy and checks that received bytes are correct.
fn through(corruption: Corruption) -> Outcome {
    let blocks: Vec<Block> = (0..4).map(|number| Block::new(number, small_layout())).collect();
    let inorder = blocks.clone();
    // One block after the other, so that the place of every byte in the stream is known.
    let server = node(
        settings(),
        std::sync::Arc::new(move |transport, request| {
            for (index, block) in (0..).zip(&inorder) {
                transport.serve_header(request.serve, index, reprise_policy::Tier::Dram, &block.checksums);
                let range = (0, block.layout.block_bytes());
                transport.serve_objects(&block.objects(request.serve, index, range, true));
            }
        }),
    );
    let requester = node(settings(), by_hand());
    let address = proxy(server.transport.local_address(), corruption);
    let (mut tracker, places) = requester.fetch(&address, 4);
    requester.finish(&mut tracker);
    let outcomes: Vec<FillOutcome> = (0..4).map(|fill| tracker.outcomes[&fill].clone()).collect();
    for ((outcome, block), span) in outcomes.iter().zip(&blocks).zip(&places) {
        if matches!(outcome, FillOutcome::Arrived { .. }) {
            assert!(bytes_of(span) == block.bytes[..], "a changed byte got through");
        }
    }
    Outcome { outcomes, requester }
}

fn arrived(outcome: &Outcome) -> Vec<bool> {
    outcome.outcomes.iter().map(|outcome| matches!(outcome, FillOutcome::Arrived { .. })).collect()
}

#[test]
fn a_bit_that_flips_in_a_payload_fails_that_block_alone() {
    let second = GREETING + HEADER_FRAME + DATA_FRAME + HEADER_FRAME + 32;
    for byte in [second, second + 5000, second + 8 * 4096 - 1] {
        let outcome = through(Corruption::Flip(byte));
        assert_eq!(outcome.outcomes[1], FillOutcome::Failed(FillError::Corrupt));
        assert_eq!(arrived(&outcome), [true, false, true, true]);
        assert_eq!(outcome.requester.transport.stats().protocol_errors, 0);
    }
}

#[test]
fn a_bit_that_flips_anywhere_else_ends_the_connection() {
    let block = GREETING + HEADER_FRAME + DATA_FRAME;
    // Magic, kind, stream, offset, length, checksum of a frame header; a checksum of the block header.
    for byte in [0, 5, 9, 21, 25, 30, 32, 40] {
        let outcome = through(Corruption::Flip(block + byte));
        assert_eq!(arrived(&outcome), [true, false, false, false], "byte {byte}");
        assert_eq!(outcome.outcomes[1], FillOutcome::Failed(FillError::PeerLost));
        assert_eq!(outcome.requester.transport.stats().protocol_errors, 1, "byte {byte}");
    }
    for byte in [0, 8, 30, 127] {
        let outcome = through(Corruption::Flip(byte));
        assert_eq!(arrived(&outcome), [false; 4], "byte {byte} of the greeting");
        assert_eq!(outcome.requester.transport.stats().protocol_errors, 1, "byte {byte}");
    }
}

#[test]
fn a_connection_cut_anywhere_fails_the_missing_blocks() {
    let per_block = HEADER_FRAME + DATA_FRAME;
    for (byte, whole) in [
        (10, 0),
        (GREETING, 0),
        (GREETING + 10, 0),
        (GREETING + HEADER_FRAME + 32 + 10_000, 0),
        (GREETING + per_block, 1),
        (GREETING + per_block + HEADER_FRAME - 1, 1),
        (GREETING + 3 * per_block + HEADER_FRAME + 32 + 8 * 4096 - 1, 3),
    ] {
        let outcome = through(Corruption::Cut(byte));
        let expected: Vec<bool> = (0..4).map(|block| block < whole).collect();
        assert_eq!(arrived(&outcome), expected, "cut at {byte}");
        for outcome in &outcome.outcomes[whole..] {
            assert_eq!(*outcome, FillOutcome::Failed(FillError::PeerLost));
        }
    }
}

//! Fuzz target of subscribers: their greeting, messages and commands in ZeroMQ's protocol.

use super::zmtp::{PeerMessage, Role, ZmtpError, greet, pong, receive};
use crate::fuzz::{Bytes, ready};

/// Maximum size of a frame, and of the frames of a message.
const FRAME_BYTES_MAX: usize = 1024;
const FRAMES_MAX: usize = 4;

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let mut greeting = vec![0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    let ready_of = |kind: &str| {
        let body = [b"\x05READY\x0bSocket-Type\0\0\0", &[kind.len() as u8][..], kind.as_bytes()].concat();
        [&[4, body.len() as u8][..], &body].concat()
    };
    let subscription = b"\x00\x04\x01kv.";
    let replay = b"\x01\x00\x00\x08\0\0\0\0\0\0\0\x09";
    let ping = b"\x04\x09\x04PING\0\x01ab";
    vec![
        [&[0][..], &greeting, &ready_of("SUB"), subscription, ping].concat(),
        [&[1][..], &greeting, &ready_of("DEALER"), replay].concat(),
        [&[0][..], &greeting, &[6, 0, 0, 0, 0, 0, 0, 1, 0]].concat(),
    ]
}

/// Reads a connection to its end. Laws: no panic, frames within their limits, and an end.
pub(crate) fn run(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    let role = if kind % 2 == 0 { Role::Publisher } else { Role::Router };
    let mut stream = Bytes(bytes);
    if ready(greet(&mut stream, role)).is_err() {
        return;
    }
    loop {
        match ready(receive(&mut stream)) {
            Ok(PeerMessage::Message(frames)) => {
                assert!((1..=FRAMES_MAX).contains(&frames.len()));
                assert!(frames.iter().all(|frame| frame.len() <= FRAME_BYTES_MAX));
            }
            Ok(PeerMessage::Command(body)) => {
                assert!(body.len() <= FRAME_BYTES_MAX);
                assert!(pong(&body).is_none_or(|pong| pong.len() <= FRAME_BYTES_MAX + 16));
            }
            Err(ZmtpError::Io(_) | ZmtpError::Peer(_)) => return,
        }
    }
}

//! ZeroMQ's wire protocol: the subset of ZMTP 3.0 (RFC 23) with the NULL mechanism that accepting PUB and
//! ROUTER sockets need.
//!
//! ```text
//!   greeting   64 bytes: FF 00×8 7F | 03 00 | "NULL" to 20 bytes | as-server 00 | 00×31
//!   command    04 length body            READY first: 05 "READY", then properties: u8 name, u32 BE value
//!   message    frames: flags (01 more, 02 long) | length u8, or u64 BE when long | body
//! ```
//!
//! All input is bounded: the size of a frame, the frames of a message, and the time for the greeting. The
//! `zeromq` crate (0.7) is unsuitable for the server side: it allocates any length that a peer claims, queues
//! 100,000 messages per subscriber, and does not limit subscribers. The tests use it as the subscriber.
//!
//! Not supported: other mechanisms, outgoing connections, ZMTP 2 and older (libzmq before 4.0).

use reprise_daemon::rejected_connections::Listener;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum size of a received frame; a subscription has a topic, a replay request a number.
const FRAME_BYTES_MAX: usize = 1024;
/// Maximum number of frames of a received message; a replay request has an empty one and a number.
const FRAMES_MAX: usize = 4;
/// Size of a greeting in bytes, RFC 23 §2.2.
const GREETING_BYTES: usize = 64;
/// Position of the mechanism in a greeting.
const MECHANISM: std::ops::Range<usize> = 12..32;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Type of a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// PUB socket that publishes batches.
    Publisher,
    /// ROUTER socket that serves replays.
    Router,
}

/// A message or command received from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PeerMessage {
    /// Frames of a message.
    Message(Vec<Vec<u8>>),
    /// Body of a command.
    Command(Vec<u8>),
}

/// Reasons to close a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ZmtpError {
    /// Read or write error, including disconnects.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// Protocol violation or inactivity of the peer.
    #[error("{0}")]
    Peer(&'static str),
}

impl Role {
    /// Listener of this role, for metrics and the log.
    pub(super) fn listener(self) -> Listener {
        match self {
            Role::Publisher => Listener::Events,
            Role::Router => Listener::Replay,
        }
    }

    fn socket_type(self) -> &'static [u8] {
        match self {
            Role::Publisher => b"PUB",
            Role::Router => b"ROUTER",
        }
    }

    /// Whether a peer socket of this type may connect, RFC 28 and 29.
    fn accepts(self, peer: &[u8]) -> bool {
        match self {
            Role::Publisher => [&b"SUB"[..], b"XSUB"].contains(&peer),
            Role::Router => [&b"REQ"[..], b"DEALER", b"ROUTER"].contains(&peer),
        }
    }
}

/// Performs the handshake with a connected peer. The caller limits its time.
pub(super) async fn greet<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    role: Role,
) -> Result<(), ZmtpError> {
    let mut ours = [0; GREETING_BYTES];
    (ours[0], ours[9], ours[10]) = (0xff, 0x7f, 3);
    ours[MECHANISM][..4].copy_from_slice(b"NULL");
    stream.write_all(&ours).await?;
    stream.flush().await?;
    let mut theirs = [0; GREETING_BYTES];
    stream.read_exact(&mut theirs).await?;
    if (theirs[0], theirs[9]) != (0xff, 0x7f) {
        return Err(ZmtpError::Peer("does not speak ZMTP"));
    }
    if theirs[10] < 3 {
        return Err(ZmtpError::Peer("speaks a ZMTP version below 3: use libzmq 4 or later"));
    }
    if theirs[MECHANISM] != ours[MECHANISM] {
        return Err(ZmtpError::Peer("requires a security mechanism other than NULL"));
    }
    let mut ready = Vec::new();
    command(&ready_body(role.socket_type()), &mut ready);
    stream.write_all(&ready).await?;
    stream.flush().await?;
    match receive(stream).await? {
        PeerMessage::Command(body) if socket_type(&body).is_some_and(|peer| role.accepts(peer)) => Ok(()),
        _ => Err(ZmtpError::Peer("has a socket type that cannot connect to this socket")),
    }
}

/// Receives the next message or command.
pub(super) async fn receive<S: AsyncRead + Unpin>(stream: &mut S) -> Result<PeerMessage, ZmtpError> {
    let mut frames = Vec::new();
    loop {
        let flags = stream.read_u8().await?;
        let length =
            if flags & LONG == 0 { u64::from(stream.read_u8().await?) } else { stream.read_u64().await? };
        let length = usize::try_from(length).ok().filter(|length| *length <= FRAME_BYTES_MAX);
        let mut body = vec![0; length.ok_or(ZmtpError::Peer("sent a frame that is too long"))?];
        stream.read_exact(&mut body).await?;
        if flags & COMMAND != 0 {
            // Commands may only occur between messages, RFC 23 §2.3.
            let between = if frames.is_empty() {
                Ok(())
            } else {
                Err(ZmtpError::Peer("sent a command within a message"))
            };
            return between.map(|()| PeerMessage::Command(body));
        }
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(PeerMessage::Message(frames));
        }
        if frames.len() == FRAMES_MAX {
            return Err(ZmtpError::Peer("sent a message with too many frames"));
        }
    }
}

/// Appends an encoded message to `out`.
pub(super) fn message(frames: &[&[u8]], out: &mut Vec<u8>) {
    for (index, body) in frames.iter().enumerate() {
        let more = if index + 1 < frames.len() { MORE } else { 0 };
        frame(more, body, out);
    }
}

/// Reply to a PING command, RFC 37 §2.5; libzmq sends PINGs if the subscriber enables heartbeats.
pub(super) fn pong(command_body: &[u8]) -> Option<Vec<u8>> {
    /// Size of the TTL field, which precedes the context that the reply repeats.
    const TTL_BYTES: usize = 2;
    let context = command_body.strip_prefix(b"\x04PING")?.get(TTL_BYTES..)?;
    let mut out = Vec::new();
    command(&[b"\x04PONG", context].concat(), &mut out);
    Some(out)
}

fn command(body: &[u8], out: &mut Vec<u8>) {
    frame(COMMAND, body, out);
}

fn frame(flags: u8, body: &[u8], out: &mut Vec<u8>) {
    match u8::try_from(body.len()) {
        Ok(length) => out.extend([flags, length]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend((body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

fn ready_body(socket_type: &[u8]) -> Vec<u8> {
    let length = u32::try_from(socket_type.len()).expect("a short name").to_be_bytes();
    [b"\x05READY\x0bSocket-Type", &length[..], socket_type].concat()
}

/// Socket type in the body of a READY command.
fn socket_type(body: &[u8]) -> Option<&[u8]> {
    let mut rest = body.strip_prefix(b"\x05READY")?;
    while let [length, after @ ..] = rest {
        let (name, after) = after.split_at_checked(usize::from(*length))?;
        let (length, after) = after.split_first_chunk::<4>()?;
        let (value, after) = after.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        rest = after;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn received(bytes: &[u8]) -> Result<PeerMessage, ZmtpError> {
        let mut bytes = bytes;
        receive(&mut bytes).await
    }

    #[tokio::test]
    async fn receives_encoded_messages_unchanged() {
        let long = [7; 300];
        let mut out = Vec::new();
        message(&[b"", b"topic", &long], &mut out);
        let frames = vec![Vec::new(), b"topic".to_vec(), long.to_vec()];
        assert_eq!(received(&out).await.expect("whole"), PeerMessage::Message(frames));
        assert_eq!(out[..2], [MORE, 0]);
        assert_eq!(out[9..18], [LONG, 0, 0, 0, 0, 0, 0, 1, 44]);
    }

    #[tokio::test]
    async fn rejects_oversized_frames_before_allocating_memory() {
        let mut endless = vec![LONG];
        endless.extend(u64::MAX.to_be_bytes());
        assert!(matches!(received(&endless).await, Err(ZmtpError::Peer(_))));
        let frames: Vec<u8> = [MORE, 0].repeat(FRAMES_MAX + 1);
        assert!(matches!(received(&frames).await, Err(ZmtpError::Peer(_))));
        assert!(matches!(received(&[MORE, 0, COMMAND, 0]).await, Err(ZmtpError::Peer(_))));
        assert!(matches!(received(&[0, 5, 1]).await, Err(ZmtpError::Io(_))), "a truncated frame");
    }

    #[tokio::test]
    async fn rejects_peers_that_are_not_subscribers() {
        let (mut here, mut there) = tokio::io::duplex(1024);
        let mut greeting = [0; GREETING_BYTES];
        (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
        greeting[MECHANISM][..4].copy_from_slice(b"NULL");
        let mut ready = Vec::new();
        command(&ready_body(b"PUSH"), &mut ready);
        there.write_all(&[&greeting[..], &ready].concat()).await.expect("sent");
        assert!(matches!(greet(&mut here, Role::Publisher).await, Err(ZmtpError::Peer(_))));
        for wrong in [0, 9, 10, MECHANISM.start] {
            let (mut here, mut there) = tokio::io::duplex(1024);
            let mut greeting = greeting;
            greeting[wrong] = 1;
            there.write_all(&greeting).await.expect("sent");
            assert!(matches!(greet(&mut here, Role::Publisher).await, Err(ZmtpError::Peer(_))), "{wrong}");
        }
    }

    #[test]
    fn finds_the_socket_type_among_properties_and_rejects_truncated_ones() {
        let body = [&b"\x05READY\x08Identity\x00\x00\x00\x02ab"[..], &ready_body(b"SUB")[6..]].concat();
        assert_eq!(socket_type(&body), Some(&b"SUB"[..]));
        for end in 0..body.len() {
            assert_eq!(socket_type(&body[..end]), None);
        }
    }

    #[test]
    fn pong_repeats_the_context_of_the_ping() {
        assert_eq!(pong(b"\x04PING\x00\x0ahi").as_deref(), Some(&b"\x04\x07\x04PONGhi"[..]));
        assert_eq!(pong(b"\x05READY"), None);
    }
}

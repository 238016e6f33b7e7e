//! An engine session without a client library: sends arbitrary bytes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use prost::Message;
use reprise_policy::Layout;
use reprise_proto::local::{self, FailureKind, request, response};

use crate::content::NAMESPACE;
use crate::wait::PATIENCE;

/// A connection to the socket of an agent.
#[derive(Debug)]
pub struct RawSession {
    stream: UnixStream,
}

/// Returns the `Hello` message of a current client.
pub fn hello(layout: &Layout) -> local::Hello {
    local::Hello {
        protocol_version: local::PROTOCOL_VERSION,
        namespace: NAMESPACE.0.to_vec().into(),
        layout: Some(wire_layout(layout)),
        client_name: "raw".to_owned(),
        tenant: String::new(),
        service_account_token: String::new(),
        gpu: None,
    }
}

/// Returns a layout as a protocol message.
pub fn wire_layout(layout: &Layout) -> local::Layout {
    let spec = layout.spec();
    local::Layout {
        layers: u32::from(spec.layers),
        parts: spec.parts as u32,
        kv_heads: u32::from(spec.kv_heads),
        head_dim: u32::from(spec.head_dim),
        dtype: spec.dtype as u32,
        tokens_per_block: u32::from(spec.tokens_per_block),
        tp_rank: u32::from(spec.tp_rank),
        tp_size: u32::from(spec.tp_size),
    }
}

impl RawSession {
    /// Connects without sending anything.
    pub fn connect(socket: &Path) -> RawSession {
        let stream = UnixStream::connect(socket).expect("the agent listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a bound on reads");
        stream.set_write_timeout(Some(PATIENCE)).expect("a bound on writes");
        RawSession { stream }
    }

    /// Connects and completes the handshake.
    pub fn with_handshake(socket: &Path, layout: &Layout) -> RawSession {
        let mut session = RawSession::connect(socket);
        session.send(1, request::Body::Hello(hello(layout)));
        let response = session.receive().and_then(|response| response.body);
        assert!(matches!(response, Some(response::Body::Welcome(_))), "expected a welcome, got {response:?}");
        session
    }

    /// Sends a request message.
    pub fn send(&mut self, id: u64, body: request::Body) {
        self.send_message(&local::Request { id, body: Some(body) }.encode_to_vec());
    }

    /// Sends arbitrary bytes as one frame.
    pub fn send_message(&mut self, message: &[u8]) {
        let length = u32::try_from(message.len()).expect("a test's frames are small");
        let mut frame = length.to_le_bytes().to_vec();
        frame.extend_from_slice(message);
        self.send_bytes(&frame);
    }

    /// Sends arbitrary bytes without a frame.
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        // Fails if the agent has closed the session, which the next `receive` reports.
        let _ = self.stream.write_all(bytes);
    }

    /// Receives the next message; `None` if the agent has closed the session.
    pub fn receive(&mut self) -> Option<local::Response> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).ok()?;
        let mut message = vec![0; u32::from_le_bytes(length) as usize];
        self.stream.read_exact(&mut message).ok()?;
        Some(local::Response::decode(message.as_slice()).expect("the agent sends valid messages"))
    }

    /// Receives the next message, which must be a failure: request id, kind and text.
    pub fn refusal(&mut self) -> (u64, FailureKind, String) {
        let response = self.receive().expect("the agent responds with a failure");
        match response.body {
            Some(response::Body::Failure(failure)) => (response.id, failure.kind(), failure.message),
            other => panic!("expected a failure, got {other:?}"),
        }
    }

    /// Waits for the next message or the end of the session. Returns whether the agent has closed it.
    pub fn is_closed(&mut self) -> bool {
        self.receive().is_none()
    }
}

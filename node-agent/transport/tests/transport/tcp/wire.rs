//! A second implementation of the peer protocol, from `docs/PROTOCOL.md`, for peers that misbehave.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use reprise_buffers::crc32c;
use reprise_policy::{BlockKey, Layout};

use crate::harness::{Block, LATER, PATIENCE};

/// Version of the protocol.
pub(crate) const VERSION: u16 = 2;

pub(crate) const REQUEST: u8 = 1;
pub(crate) const CREDIT: u8 = 2;
pub(crate) const OFFER: u8 = 4;
pub(crate) const BLOCK_HEADER: u8 = 16;
pub(crate) const DATA: u8 = 17;
pub(crate) const ABSENT: u8 = 18;
pub(crate) const ALIVE: u8 = 19;
pub(crate) const OFFER_ANSWER: u8 = 20;

/// A frame of the peer protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) stream: u64,
    pub(crate) block: u32,
    pub(crate) argument: u32,
    pub(crate) body: Vec<u8>,
}

pub(crate) fn hello(version: u16, credit_bytes: u64, stall_timeout_ms: u32) -> [u8; 128] {
    hello_of("fake", version, credit_bytes, stall_timeout_ms)
}

/// Encodes a greeting with this name of a node.
pub(crate) fn hello_of(node: &str, version: u16, credit_bytes: u64, stall_timeout_ms: u32) -> [u8; 128] {
    let mut out = [0; 128];
    out[..8].copy_from_slice(b"RPRSPEER");
    out[8..10].copy_from_slice(&version.to_le_bytes());
    out[12..16].copy_from_slice(&stall_timeout_ms.to_le_bytes());
    out[16..24].copy_from_slice(&credit_bytes.to_le_bytes());
    out[10..12].copy_from_slice(&(node.len() as u16).to_le_bytes());
    out[24..24 + node.len()].copy_from_slice(node.as_bytes());
    let crc = crc32c(&out[..124]);
    out[124..].copy_from_slice(&crc.to_le_bytes());
    out
}

/// Encodes the greeting of a correct peer.
pub(crate) fn good_hello() -> [u8; 128] {
    hello(VERSION, 1 << 20, 2000)
}

pub(crate) fn header(kind: u8, stream: u64, block: u32, argument: u32, length: u32) -> [u8; 32] {
    let mut out = [0; 32];
    out[..4].copy_from_slice(b"RPRF");
    out[4] = 1;
    out[5] = kind;
    out[8..16].copy_from_slice(&stream.to_le_bytes());
    out[16..20].copy_from_slice(&block.to_le_bytes());
    out[20..24].copy_from_slice(&argument.to_le_bytes());
    out[24..28].copy_from_slice(&length.to_le_bytes());
    let crc = crc32c(&out[..28]);
    out[28..].copy_from_slice(&crc.to_le_bytes());
    out
}

/// Encodes a frame whose argument is the checksum of its body.
pub(crate) fn with_body(kind: u8, stream: u64, block: u32, body: &[u8]) -> Vec<u8> {
    let mut out = header(kind, stream, block, crc32c(body), body.len() as u32).to_vec();
    out.extend_from_slice(body);
    out
}

pub(crate) fn data(stream: u64, block: u32, offset: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = header(DATA, stream, block, offset, payload.len() as u32).to_vec();
    out.extend_from_slice(payload);
    out
}

pub(crate) fn block_header(stream: u64, block: u32, checksums: &[u32]) -> Vec<u8> {
    let mut body = vec![1, 0, 0, 0];
    for checksum in checksums {
        body.extend_from_slice(&checksum.to_le_bytes());
    }
    with_body(BLOCK_HEADER, stream, block, &body)
}

/// Sends the header of a block and all its bytes.
pub(crate) fn send_block(to: &mut TcpStream, stream: u64, block: &Block) {
    to.write_all(&block_header(stream, 0, &block.checksums)).expect("sent");
    to.write_all(&data(stream, 0, 0, &block.bytes)).expect("sent");
}

/// Reports the first block of a request as absent.
pub(crate) fn send_absent(to: &mut TcpStream, stream: u64) {
    to.write_all(&header(ABSENT, stream, 0, 0, 0)).expect("sent");
}

pub(crate) fn request(stream: u64, layout: Layout, keys: &[BlockKey]) -> Vec<u8> {
    request_within(stream, layout, keys, LATER)
}

pub(crate) fn request_within(stream: u64, layout: Layout, keys: &[BlockKey], deadline: Duration) -> Vec<u8> {
    let mut body = layout.encode().to_vec();
    body.extend_from_slice(&(deadline.as_micros() as u64).to_le_bytes());
    body.extend_from_slice(&(keys.len() as u32).to_le_bytes());
    let tenant = b"default";
    body.extend_from_slice(&[tenant.len() as u8, 0, 0, 0]);
    body.extend_from_slice(tenant);
    body.resize(96, 0);
    body.extend_from_slice(&BlockKey::pack(keys));
    with_body(REQUEST, stream, 0, &body)
}

pub(crate) fn read_frame(stream: &mut TcpStream) -> io::Result<Frame> {
    let mut bytes = [0; 32];
    stream.read_exact(&mut bytes)?;
    assert_eq!(&bytes[..4], b"RPRF");
    assert_eq!(crc32c(&bytes[..28]).to_le_bytes(), bytes[28..32], "checksum of a frame header");
    let four = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let mut body = vec![0; four(24) as usize];
    stream.read_exact(&mut body)?;
    let stream_number = u64::from(four(8)) | u64::from(four(12)) << 32;
    let frame = Frame { kind: bytes[5], stream: stream_number, block: four(16), argument: four(20), body };
    if frame.kind != DATA {
        assert!(frame.body.is_empty() || crc32c(&frame.body) == frame.argument, "checksum of a body");
    }
    Ok(frame)
}

/// A listener that the test drives as the serving side.
pub(crate) struct FakeServer {
    listener: TcpListener,
}

impl FakeServer {
    pub(crate) fn new() -> FakeServer {
        FakeServer { listener: TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback") }
    }

    pub(crate) fn address(&self) -> String {
        self.listener.local_addr().expect("it has an address").to_string()
    }

    /// Accepts the next connection, before any greeting.
    pub(crate) fn accept(&self) -> TcpStream {
        let (stream, _) = self.listener.accept().expect("a connection");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream
    }

    /// Accepts the next connection and exchanges greetings.
    pub(crate) fn accept_greeted(&self) -> TcpStream {
        let mut stream = self.accept();
        let mut theirs = [0; 128];
        stream.read_exact(&mut theirs).expect("a greeting");
        assert_eq!(&theirs[..8], b"RPRSPEER");
        stream.write_all(&good_hello()).expect("greeted");
        stream
    }

    /// Accepts the next connection, greets, and reads its first request's number.
    pub(crate) fn accept_request(&self) -> (TcpStream, u64) {
        let mut stream = self.accept_greeted();
        let frame = read_frame(&mut stream).expect("a request");
        assert_eq!(frame.kind, REQUEST);
        (stream, frame.stream)
    }
}

/// A greeted connection that the test drives as the requesting side.
pub(crate) fn connect(address: SocketAddr, hello: &[u8; 128]) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.write_all(hello).expect("sent");
    let mut theirs = [0; 128];
    stream.read_exact(&mut theirs).expect("a greeting");
    assert_eq!(theirs[..10], hello_prefix());
    stream
}

fn hello_prefix() -> [u8; 10] {
    let mut prefix = *b"RPRSPEER\0\0";
    prefix[8..].copy_from_slice(&VERSION.to_le_bytes());
    prefix
}

/// Reports whether the other side has closed the connection (not merely fallen silent).
pub(crate) fn is_closed(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

//! Each decoder of the wire format, with the right checksum or without it.
//!
//! Laws: decoding never panics, and a decoded value is equal after its encoding.

use std::time::Duration;

use reprise_buffers::crc32c;
use reprise_policy::{BlockKey, TenantName, Tier};

use super::layouts;
use crate::limits::{CREDIT_BYTES_MAX, CREDIT_BYTES_MIN, NODE_NAME_BYTES_MAX};
use crate::wire::{
    BlocksBody, FRAME_HEADER_BYTES, FrameHeader, HELLO_BYTES, Hello, Kind, OfferAnswerBody,
    decode_block_header, encode_block_header,
};

/// Number of decoders in this target.
const DECODERS: u8 = 5;

/// Flag of the first byte: the checksum stays as it is.
const UNSEALED: u8 = 0x80;

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let [layout, _] = layouts();
    let keys = vec![BlockKey([1; 16]), BlockKey([2; 16])];
    let deadline = Duration::from_millis(1500);
    let hello = Hello {
        node_name: "node-a".to_owned(),
        credit_bytes: 64 << 20,
        stall_timeout: Duration::from_secs(2),
    };
    let frame = FrameHeader { kind: Kind::Data, stream: 7, block: 3, argument: 64, length: 64 };
    let tenant = TenantName::default_tenant();
    let blocks = BlocksBody { layout, deadline, tenant, keys };
    let answer = OfferAnswerBody { retry_after: deadline, keys: 10, taken: vec![0, 3, 9] };
    let bodies: [Vec<u8>; DECODERS as usize] = [
        hello.encode().to_vec(),
        frame.encode().to_vec(),
        blocks.encode(),
        answer.encode(),
        encode_block_header(Tier::Nvme, &[1, 2, 3, 4]),
    ];
    (0..DECODERS).zip(bodies).map(|(decoder, body)| [&[decoder][..], &body].concat()).collect()
}

pub(super) fn run(input: &[u8]) {
    let Some((choice, bytes)) = input.split_first() else { return };
    let is_sealed = choice & UNSEALED == 0;
    match choice % DECODERS {
        0 => greeting(&fixed(bytes, is_sealed)),
        1 => frame(&fixed(bytes, is_sealed)),
        2 => {
            if let Ok(blocks) = BlocksBody::decode(bytes) {
                assert_eq!(BlocksBody::decode(&blocks.encode()), Ok(blocks));
            }
        }
        3 => {
            if let Ok(answer) = OfferAnswerBody::decode(bytes) {
                assert!(answer.taken.iter().all(|at| (*at as usize) < answer.keys));
                assert_eq!(OfferAnswerBody::decode(&answer.encode()), Ok(answer));
            }
        }
        _ => {
            if let Ok((tier, checksums)) = decode_block_header(bytes) {
                assert_eq!(
                    decode_block_header(&encode_block_header(tier, &checksums)),
                    Ok((tier, checksums))
                );
            }
        }
    }
}

/// The first bytes of an input, padded with zeros; sealed with the checksum of all before it.
fn fixed<const BYTES: usize>(bytes: &[u8], is_sealed: bool) -> [u8; BYTES] {
    let mut out = [0; BYTES];
    let count = bytes.len().min(BYTES);
    out[..count].copy_from_slice(&bytes[..count]);
    if is_sealed {
        let checksum = crc32c(&out[..BYTES - 4]);
        out[BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
    }
    out
}

fn greeting(bytes: &[u8; HELLO_BYTES]) {
    if let Ok(hello) = Hello::decode(bytes) {
        assert!((1..=NODE_NAME_BYTES_MAX).contains(&hello.node_name.len()));
        assert!((CREDIT_BYTES_MIN..=CREDIT_BYTES_MAX).contains(&hello.credit_bytes));
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
    }
}

fn frame(bytes: &[u8; FRAME_HEADER_BYTES]) {
    if let Ok(header) = FrameHeader::decode(bytes) {
        assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
    }
}

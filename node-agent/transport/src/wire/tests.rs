//! The wire format of this protocol version, which must not change.

use proptest::prelude::*;
use reprise_policy::LayoutSpec;

use super::*;

const DOCUMENT: &str = include_str!("../../../../docs/PROTOCOL.md");

const OFFER: &str = "20000201080080001000000001000000404b4c000000000002000000060000007465616d2d61000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000001111111111111111111111111111111122222222222222222222222222222222";
const OFFER_HEADER: &str = "5250524601040000020000000000000000000000df8625ac80000000d8183b5b";
const OFFER_ANSWER: &str = "90d00300000000000a000000000000000902";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Checks that the bytes are an example in `docs/PROTOCOL.md`.
fn assert_documented(bytes: &[u8]) {
    let bytes = hex(bytes);
    assert!(DOCUMENT.contains(&format!("`{bytes}`")), "docs/PROTOCOL.md lacks: {bytes}");
}

fn layout() -> Layout {
    LayoutSpec { layers: 32, kv_heads: 8, head_dim: 128, tokens_per_block: 16, ..LayoutSpec::LLAMA_3_8B }
        .validate()
        .expect("valid")
}

fn hello() -> Hello {
    Hello { node_name: "node-a".into(), credit_bytes: 64 << 20, stall_timeout: Duration::from_secs(2) }
}

#[test]
fn a_greeting_has_the_bytes_of_version_2() {
    let bytes = hello().encode();
    assert_eq!(hex(&bytes[..32]), "525052535045455202000600d007000000000004000000006e6f64652d610000");
    assert!(bytes[32..124].iter().all(|byte| *byte == 0));
    assert_eq!(hex(&bytes[124..]), "18f66de3");
    assert_documented(&bytes[..32]);
    assert_documented(&bytes[124..]);
    assert_eq!(Hello::decode(&bytes), Ok(hello()));
}

#[test]
fn frame_headers_have_the_bytes_of_version_2() {
    let header = FrameHeader { kind: Kind::Data, stream: 7, block: 3, argument: 65_536, length: 32_768 };
    assert_eq!(hex(&header.encode()), "525052460111000007000000000000000300000000000100008000009ac51c2d");
    assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
    assert_documented(&header.encode());
    let credit = FrameHeader::bare(Kind::Credit, 16 << 20, 0);
    assert_eq!(hex(&credit.encode()), "52505246010200000000000100000000000000000000000000000000e3ec781b");
    assert_documented(&credit.encode());
}

#[test]
fn a_request_has_the_bytes_of_version_2() {
    let keys = vec![BlockKey([0x11; 16]), BlockKey([0x22; 16])];
    let tenant = "team-a".parse().expect("a name");
    let request = BlocksBody { layout: layout(), deadline: Duration::from_millis(1500), tenant, keys };
    let body = request.encode();
    assert_eq!(
        hex(&body),
        "2000020108008000100000000100000060e316000000000002000000060000007465616d2d61000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000001111111111111111111111111111111122222222222222222222222222222222"
    );
    assert_eq!(BlocksBody::decode(&body), Ok(request));
    assert_documented(&body);
    let header = FrameHeader::with_body(Kind::Request, 1, 0, &body);
    assert_eq!(hex(&header.encode()), "5250524601010000010000000000000000000000f8864f8880000000f6d84199");
    assert_eq!(header.check_body(&body), Ok(()));
    assert_documented(&header.encode());
}

#[test]
fn a_block_header_has_the_bytes_of_version_2() {
    let body = encode_block_header(Tier::Nvme, &[0x0102_0304, 0xffff_fffe]);
    assert_eq!(hex(&body), "0200000004030201feffffff");
    assert_documented(&body);
    let checksums = vec![0x0102_0304, 0xffff_fffe].into_boxed_slice();
    assert_eq!(decode_block_header(&body), Ok((Tier::Nvme, checksums)));
}

#[test]
fn an_offer_has_the_bytes_of_version_2() {
    let keys = vec![BlockKey([0x11; 16]), BlockKey([0x22; 16])];
    let tenant = "team-a".parse().expect("a name");
    let offer = BlocksBody { layout: layout(), deadline: Duration::from_secs(5), tenant, keys };
    let body = offer.encode();
    assert_eq!(hex(&body), OFFER);
    assert_documented(&body);
    assert_eq!(BlocksBody::decode(&body), Ok(offer));
    let header = FrameHeader::with_body(Kind::Offer, 2, 0, &body).encode();
    assert_eq!(hex(&header), OFFER_HEADER);
    assert_documented(&header);
}

#[test]
fn an_answer_to_an_offer_has_the_bytes_of_version_2() {
    let answer = OfferAnswerBody { retry_after: Duration::from_millis(250), keys: 10, taken: vec![0, 3, 9] };
    let body = answer.encode();
    assert_eq!(hex(&body), OFFER_ANSWER);
    assert_documented(&body);
    assert_eq!(OfferAnswerBody::decode(&body), Ok(answer));
}

#[test]
fn an_offer_without_a_name_or_with_a_wrong_key_count_is_malformed() {
    let keys = vec![BlockKey([0x11; 16])];
    let offer =
        BlocksBody { layout: layout(), deadline: Duration::ZERO, tenant: TenantName::default_tenant(), keys };
    let sound = offer.encode();
    assert!(BlocksBody::decode(&sound).is_ok());
    for (at, byte) in [(28, 0), (28, 200), (32, b'A'), (24, 2), (2, 9)] {
        let mut body = sound.clone();
        body[at] = byte;
        assert!(matches!(BlocksBody::decode(&body), Err(ProtocolError::Malformed(_))), "byte {at}");
    }
    assert!(BlocksBody::decode(&sound[..sound.len() - 1]).is_err());
    for body in [&[0; 15][..], &[0; 16], &[0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1]] {
        assert!(matches!(OfferAnswerBody::decode(body), Err(ProtocolError::Malformed(_))));
    }
}

#[test]
fn a_newer_version_is_reported_despite_other_changes() {
    let mut bytes = hello().encode();
    bytes[8] = 3;
    bytes[100] = 1;
    let error = Hello::decode(&bytes).expect_err("refused");
    assert_eq!(error, ProtocolError::Version { found: 3 });
    assert!(error.to_string().contains("version 3") && error.to_string().contains("speaks 2"), "{error}");
}

proptest! {
    #[test]
    fn decoding_any_bytes_neither_panics_nor_accepts_a_wrong_checksum(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        flip in 0usize..32 * 8,
    ) {
        // Decoding accepts any input; its result for random bytes does not matter here.
        let _ = BlocksBody::decode(&bytes);
        let _ = decode_block_header(&bytes);
        let _ = OfferAnswerBody::decode(&bytes);
        if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() {
            prop_assert!(Hello::decode(hello).is_err());
        }
        let mut header = FrameHeader::bare(Kind::Absent, 9, 1).encode();
        header[flip / 8] ^= 1 << (flip % 8);
        prop_assert!(FrameHeader::decode(&header).is_err());
    }
}

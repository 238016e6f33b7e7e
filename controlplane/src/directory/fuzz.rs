//! Fuzz target of updates of the directory: what an agent announces.

use prost::Message as _;
use reprise_controlplane_core::Changes;
use reprise_policy::{BlockKey, SlotSet};
use reprise_proto::controlplane::UpdateRequest;
use reprise_proto::local::KEYS_PER_CALL_MAX;

use super::{Batch, unpack};

pub(crate) fn seed() -> Vec<Vec<u8>> {
    let request = UpdateRequest {
        node: 7,
        epoch: 3,
        sequence: 9,
        keys: vec![5; 2 * BlockKey::SIZE].into(),
        operations: vec![0x81, 0x02].into(),
        reset: true,
        begins: SlotSet::ALL.to_bytes().to_vec().into(),
        ends: Vec::new().into(),
    };
    let short = UpdateRequest { begins: Vec::new().into(), reset: false, ..request.clone() };
    [short, request].map(|request| [&[0][..], &request.encode_to_vec()].concat()).to_vec()
}

/// Checks an update. Laws: no panic, all numbers of its changes exist, and every part can be parsed again.
pub(crate) fn update(message: &[u8]) {
    let keys = unpack(message);
    assert!(keys.is_err() || keys.is_ok_and(|keys| keys.len() <= KEYS_PER_CALL_MAX));
    let Ok(request) = UpdateRequest::decode(message) else { return };
    let Ok(batch) = Batch::check(request) else { return };
    assert!(batch.count <= KEYS_PER_CALL_MAX);
    assert!(batch.number_of(batch.count) >= batch.sequence, "numbers of changes only grow");
    let changes = Changes::parse(&batch.keys, &batch.operations).expect("validated on arrival");
    assert_eq!(changes.range(0..batch.count).len(), batch.count);
}

//! Blocks whose every byte can be checked: content is a function of the block's number.

use std::path::Path;
use std::time::Duration;

use reprise_client::{BlockStatus, Client, ConnectOptions, Load, LoadRequest, Scope, Ticket};
use reprise_policy::{BlockKey, Dtype, Layout, LayoutSpec, NamespaceDigest, Parts};

/// Time for anything that a test waits for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// 8 layers of 2 objects of 4 KiB: 64 KiB a block.
pub(crate) fn layout() -> Layout {
    layout_of(8, 128)
}

/// `tokens × 2 × 64` elements of 2 bytes an object.
pub(crate) fn layout_of(layers: u16, head_dim: u16) -> Layout {
    let spec = LayoutSpec {
        layers,
        parts: Parts::KeyValue,
        kv_heads: 1,
        head_dim,
        dtype: Dtype::Bf16,
        tokens_per_block: 16,
        tp_rank: 0,
        tp_size: 1,
    };
    spec.validate().expect("a valid layout")
}

pub(crate) fn namespace() -> NamespaceDigest {
    NamespaceDigest([7; 32])
}

pub(crate) fn connect(socket: &Path) -> Client {
    connect_with(socket, layout())
}

pub(crate) fn connect_with(socket: &Path, layout: Layout) -> Client {
    let options = ConnectOptions::new(socket, namespace(), layout).client_name("test").call_timeout(PATIENCE);
    Client::connect(options).expect("the agent takes the session")
}

pub(crate) fn key(number: u64) -> BlockKey {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    key[8..].copy_from_slice(&number.wrapping_mul(0xC2B2_AE3D_27D4_EB4F).to_le_bytes());
    BlockKey(key)
}

pub(crate) fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<BlockKey> {
    numbers.into_iter().map(key).collect()
}

/// Bytes of one object of one block.
pub(crate) fn object(layout: &Layout, number: u64, object: u32) -> Vec<u8> {
    let seed = number.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ (u64::from(object) << 17) | 1;
    let words = layout.object_bytes() / 8;
    let mut state = seed;
    let mut bytes = Vec::with_capacity(layout.object_bytes() as usize);
    for _ in 0..words {
        // xorshift64: any two objects differ in nearly every word.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.resize(layout.object_bytes() as usize, 0);
    bytes
}

/// Saves blocks in one commit.
pub(crate) fn save(client: &Client, numbers: impl IntoIterator<Item = u64>) -> Ticket {
    let numbers: Vec<u64> = numbers.into_iter().collect();
    let layout = *client.layout();
    let mut reserved = Vec::new();
    while reserved.len() < numbers.len() {
        let missing = (numbers.len() - reserved.len()) as u32;
        let more = client.reserve(missing, PATIENCE).expect("slots");
        assert!(!more.is_empty(), "the arena gave no slot");
        reserved.extend(more);
    }
    for (reservation, number) in reserved.iter_mut().zip(&numbers) {
        for index in 0..layout.objects() {
            reservation.fill_object(index, &object(&layout, *number, index)).expect("filled");
        }
    }
    let items = reserved.into_iter().zip(numbers.iter().copied().map(key)).collect();
    let outcome = client.commit(items, reprise_client::Priority::Normal).expect("committed");
    assert!(outcome.statuses.iter().all(|status| status.is_committed()), "{:?}", outcome.statuses);
    outcome.ticket
}

/// Saves blocks and waits until they are durable.
pub(crate) fn save_durably(client: &Client, numbers: impl IntoIterator<Item = u64>) {
    let numbers: Vec<u64> = numbers.into_iter().collect();
    let ticket = save(client, numbers.iter().copied());
    let outcome = client.wait_durable(ticket, PATIENCE).expect("a notice");
    assert_eq!((outcome.durable as usize, outcome.lost_keys.len()), (numbers.len(), 0));
}

/// A load that waits for its last layer; gives the status of each block.
pub(crate) fn load(client: &Client, numbers: &[u64]) -> (Load, Vec<BlockStatus>) {
    let mut request = LoadRequest::new(keys(numbers.iter().copied()));
    request.scope = Scope::Local;
    request.deadline = PATIENCE;
    let load = client.load(&request).expect("an answer");
    load.wait_layer(client.layout().layers() - 1, PATIENCE)
        .expect("the last layer, or every block has failed");
    let statuses = (0..numbers.len()).map(|block| load.status(block)).collect();
    (load, statuses)
}

/// Compares every byte of the blocks of a load that are there; gives their number.
pub(crate) fn verify(client: &Client, load: &Load, numbers: &[u64]) -> usize {
    let layout = *client.layout();
    let mut copy = vec![0; layout.object_bytes() as usize];
    let mut verified = 0;
    for (block, number) in numbers.iter().enumerate() {
        if load.status(block) != BlockStatus::Ok {
            continue;
        }
        for index in 0..layout.objects() {
            load.copy_object(block, index, &mut copy).expect("a verified copy");
            assert!(
                copy == object(&layout, *number, index),
                "object {index} of block {number} has other bytes"
            );
        }
        verified += 1;
    }
    verified
}

/// Loads blocks that must all be there, and compares every byte.
pub(crate) fn load_all(client: &Client, numbers: impl IntoIterator<Item = u64>) {
    let numbers: Vec<u64> = numbers.into_iter().collect();
    let (load, statuses) = load(client, &numbers);
    assert!(statuses.iter().all(|status| *status == BlockStatus::Ok), "{statuses:?}");
    assert_eq!(verify(client, &load, &numbers), numbers.len());
}

//! Fuzz target of the structures that a controller returns (`make fuzz`).

use crate::spec::{
    Command, Completion, ControllerIdentity, IDENTIFY_BYTES, MemoryBufferProperties, NamespaceIdentity,
    NamespaceList,
};

#[test]
fn nvme_structures() {
    let identity = ControllerIdentity {
        serial: "S1".into(),
        model: "A model".into(),
        firmware: "1.0".into(),
        transfer_max: Some(512 << 10),
        aborts_max: 4,
        events_max: 4,
        namespaces: 2,
        write_zeroes: true,
        write_cache: true,
        sgl: true,
    };
    let seeds = [identity.encode().to_vec(), NamespaceList(vec![1, 2]).encode().to_vec(), vec![7; 64]];
    reprise_fuzz::check("nvme_structures", &seeds, run);
}

/// Decodes each structure. Laws: no panic, and a decoded structure is equal after its encoding.
fn run(input: &[u8]) {
    let mut page = [0; IDENTIFY_BYTES];
    let count = input.len().min(page.len());
    page[..count].copy_from_slice(&input[..count]);
    let controller = ControllerIdentity::decode(&page);
    assert!(controller.transfer_max.is_none_or(|bytes| bytes >= 4096));
    let list = NamespaceList::decode(&page);
    assert_eq!(NamespaceList::decode(&list.encode()), list);
    let namespace = NamespaceIdentity::decode(&page);
    assert_eq!(NamespaceIdentity::decode(&namespace.encode()), namespace);
    let word = |at: usize| u64::from_le_bytes(*page[8 * at..].first_chunk().expect("inside the page"));
    let dword = |at: usize| u32::from_le_bytes(*page[4 * at..].first_chunk().expect("inside the page"));
    let (id, command) = Command::decode(std::array::from_fn(word));
    let (same_id, same) = Command::decode(command.encode(id));
    // Unknown kinds of SGL descriptors are not encoded.
    assert_eq!(
        (same_id, same.opcode, same.namespace, same.dwords),
        (id, command.opcode, command.namespace, command.dwords)
    );
    let completion = Completion::decode(std::array::from_fn(dword));
    assert_eq!(Completion::decode(completion.encode()), completion);
    MemoryBufferProperties::decode(dword(0), dword(1));
}

//! Generates the wire types. `protox` compiles the .proto files in Rust, so no installed protoc is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=protos");
    let files = protox::compile(
        ["local.proto", "controlplane.proto", "events.proto", "placement.proto"],
        ["protos"],
    )?;
    tonic_prost_build::configure().bytes(".").compile_fds(files)?;
    Ok(())
}

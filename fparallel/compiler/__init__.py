"""The compiler: function -> Program -> layouts -> local programs -> Schedule. It never imports the runtime."""
